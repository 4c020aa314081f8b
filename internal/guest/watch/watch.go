// Package watch reports changes below a directory, using inotify(7).
package watch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"bivy/internal/guest/accounts"
)

const (
	// MaxDirs is how many directories one recursive watcher follows.
	MaxDirs = 8192
	// maxReported is how many entries are remembered that were reported before
	// the kernel's event for them arrived.
	maxReported = 4096
)

// ErrLost means that there were more changes or more directories than a watcher
// can follow. The watcher has ended.
var ErrLost = errors.New("too many changes or directories: events were lost")

// Kind is what happened to an entry.
type Kind uint8

// The kinds of events.
const (
	Create Kind = iota + 1
	Write
	Remove
	Rename
	Chmod
)

// Event is one change. Name is relative to the watched directory; "." is the
// directory itself.
type Event struct {
	Name string
	Kind Kind
}

// Watcher follows one directory. Its events must be read, or the kernel's
// queue overflows and the watcher ends with ErrLost.
type Watcher struct {
	// Events is closed at the end, when Err says why.
	Events <-chan Event

	root      string
	user      accounts.User
	recursive bool
	inotify   *os.File
	raw       syscall.RawConn // the same, for calls that do not read
	events    chan Event
	closing   chan struct{}
	once      sync.Once

	// Used by the reading goroutine only, once it runs.
	dirs     map[int32]string    // watch descriptor to path below root, "" for root
	reported map[string]struct{} // entries reported before the kernel's event arrived
	moved    move                // a directory that was moved away, possibly to another place below root
	err      error
}

// move is the first half of a directory's renaming.
type move struct {
	cookie uint32 // zero: none
	from   string
}

const dirMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_DELETE | unix.IN_DELETE_SELF | unix.IN_MOVED_FROM |
	unix.IN_MOVED_TO | unix.IN_MOVE_SELF | unix.IN_ATTRIB | unix.IN_ONLYDIR

// New starts to watch the directory root with the rights of u. Recursive
// watchers include directories that come later. It must be closed.
func New(u accounts.User, root string, recursive bool) (*Watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	inotify := os.NewFile(uintptr(fd), "inotify") //nolint:gosec // a descriptor is small
	raw, err := inotify.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, inotify.Close())
	}
	events := make(chan Event)
	w := &Watcher{
		Events: events, root: root, user: u, recursive: recursive,
		inotify: inotify, raw: raw, events: events, closing: make(chan struct{}),
		dirs: map[int32]string{}, reported: map[string]struct{}{},
	}
	err = u.Do(func() error {
		if err := w.add(""); err != nil {
			return err
		}
		if !recursive {
			return nil
		}
		return w.addTree("", nil)
	})
	if err != nil {
		return nil, errors.Join(err, w.inotify.Close())
	}
	go w.run() // ends when Close closes the descriptor
	return w, nil
}

// Close ends the watcher.
func (w *Watcher) Close() error {
	err := os.ErrClosed
	w.once.Do(func() {
		close(w.closing)
		err = w.inotify.Close()
	})
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

// Err returns why Events was closed: nil after Close, ErrLost, or an error of the
// kernel. It may be called once Events is closed.
func (w *Watcher) Err() error { return w.err }

// add watches one directory.
func (w *Watcher) add(dir string) error {
	if len(w.dirs) >= MaxDirs {
		return ErrLost
	}
	mask := uint32(dirMask)
	if dir != "" {
		mask |= unix.IN_DONT_FOLLOW
	}
	wd := 0
	var err error
	closed := w.raw.Control(func(fd uintptr) {
		wd, err = unix.InotifyAddWatch(int(fd), filepath.Join(w.root, dir), mask)
	})
	switch {
	case closed != nil:
		return closed
	case errors.Is(err, unix.ENOSPC):
		return ErrLost
	case err != nil:
		return &os.PathError{Op: "watch", Path: filepath.Join(w.root, dir), Err: err}
	}
	w.dirs[int32(wd)] = dir //nolint:gosec // watch descriptors are small
	return nil
}

// addTree watches the directories below dir and calls report for every entry that
// it finds. Directories that are removed meanwhile or not readable are skipped.
func (w *Watcher) addTree(dir string, report func(name string)) error {
	f, err := os.Open(filepath.Join(w.root, dir))
	if err != nil {
		return nil //nolint:nilerr // see above
	}
	defer f.Close()
	for {
		entries, err := f.ReadDir(256)
		for _, e := range entries {
			name := filepath.Join(dir, e.Name())
			if report != nil {
				report(name)
			}
			if !e.IsDir() {
				continue
			}
			if err := w.add(name); errors.Is(err, ErrLost) {
				return err
			} else if err != nil {
				continue
			}
			if err := w.addTree(name, report); err != nil {
				return err
			}
		}
		if err != nil || len(entries) == 0 {
			return nil //nolint:nilerr // the end, or a directory that was removed
		}
	}
}

func (w *Watcher) run() {
	defer close(w.events)
	var buf [16 << 10]byte
	for {
		n, err := w.inotify.Read(buf[:])
		if err != nil {
			if !errors.Is(err, os.ErrClosed) {
				w.err = fmt.Errorf("read inotify: %w", err)
			}
			return
		}
		for b := buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
			raw := rawEvent{
				wd:     int32(binary.NativeEndian.Uint32(b[unsafe.Offsetof(unix.InotifyEvent{}.Wd):])), //nolint:gosec // the kernel's type
				mask:   binary.NativeEndian.Uint32(b[unsafe.Offsetof(unix.InotifyEvent{}.Mask):]),
				cookie: binary.NativeEndian.Uint32(b[unsafe.Offsetof(unix.InotifyEvent{}.Cookie):]),
			}
			length := int(binary.NativeEndian.Uint32(b[unsafe.Offsetof(unix.InotifyEvent{}.Len):]))
			name := b[unix.SizeofInotifyEvent : unix.SizeofInotifyEvent+length]
			raw.name = strings.TrimRight(string(name), "\x00")
			b = b[unix.SizeofInotifyEvent+length:]
			if !w.handle(raw) {
				return
			}
		}
	}
}

type rawEvent struct {
	wd     int32
	mask   uint32
	cookie uint32
	name   string
}

// handle converts one event of the kernel and sends it. It returns false when the
// watcher has to end.
func (w *Watcher) handle(e rawEvent) bool {
	if e.mask&unix.IN_Q_OVERFLOW != 0 {
		w.err = ErrLost
		return false
	}
	arrived := w.moved.cookie != 0 && e.mask&unix.IN_MOVED_TO != 0 && e.cookie == w.moved.cookie
	if w.moved.cookie != 0 && !arrived {
		// The two events of a rename are consecutive, so this directory was moved
		// out of root.
		w.unwatchTree(w.moved.from)
		w.moved = move{}
	}
	dir, ok := w.dirs[e.wd]
	if !ok {
		return true // of a directory that is not watched any more
	}
	if e.mask&unix.IN_IGNORED != 0 {
		delete(w.dirs, e.wd)
		return true
	}
	if e.name == "" && dir != "" {
		return true // the parent directory's watch reports it too, with a name
	}
	name := filepath.Join(dir, e.name)
	if name == "" {
		name = "."
	}
	isDir := e.mask&unix.IN_ISDIR != 0
	if e.mask&unix.IN_MOVED_FROM != 0 && isDir {
		w.moved = move{e.cookie, name}
	}
	if arrived {
		w.rename(w.moved.from, name)
		w.moved = move{}
	}
	_, known := w.reported[name]
	delete(w.reported, name)
	if e.mask&unix.IN_CREATE != 0 && known {
		return true
	}
	for _, k := range kinds {
		if e.mask&k.mask != 0 && !w.send(Event{name, k.kind}) {
			return false
		}
	}
	if w.recursive && isDir && !arrived && e.mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0 {
		return w.watchNewDir(name)
	}
	return true
}

var kinds = [...]struct {
	mask uint32
	kind Kind
}{
	{unix.IN_CREATE | unix.IN_MOVED_TO, Create},
	{unix.IN_MODIFY, Write},
	{unix.IN_DELETE | unix.IN_DELETE_SELF, Remove},
	{unix.IN_MOVED_FROM | unix.IN_MOVE_SELF, Rename},
	{unix.IN_ATTRIB, Chmod},
}

// watchNewDir starts to watch a directory that was created or moved here. It sends
// events for the entries that are in it already; the kernel may report some of
// them again.
func (w *Watcher) watchNewDir(dir string) bool {
	var names []string
	err := w.user.Do(func() error {
		if err := w.add(dir); err != nil {
			return err
		}
		return w.addTree(dir, func(name string) {
			names = append(names, name)
			if len(w.reported) < maxReported {
				w.reported[name] = struct{}{}
			}
		})
	})
	if errors.Is(err, ErrLost) {
		w.err = err
		return false
	}
	// Any other error: the directory was removed, or is not readable.
	for _, name := range names {
		if !w.send(Event{name, Create}) {
			return false
		}
	}
	return true
}

// below reports whether path is dir or below it.
func below(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

// unwatchTree stops watching a directory that was moved out of root.
func (w *Watcher) unwatchTree(dir string) {
	for wd, d := range w.dirs {
		if below(d, dir) {
			delete(w.dirs, wd)
			_ = w.raw.Control(func(fd uintptr) { // fails only when the watch or the watcher has ended
				_, _ = unix.InotifyRmWatch(int(fd), uint32(wd)) //nolint:gosec // a descriptor of the kernel
			})
		}
	}
	for name := range w.reported {
		if below(name, dir) {
			delete(w.reported, name)
		}
	}
}

// rename records the new name of a directory. The kernel's watches belong to the
// directory itself and stay, so that no event is missed.
func (w *Watcher) rename(from, to string) {
	for wd, d := range w.dirs {
		if below(d, from) {
			w.dirs[wd] = to + d[len(from):]
		}
	}
	for name := range w.reported {
		if below(name, from) {
			delete(w.reported, name)
			w.reported[to+name[len(from):]] = struct{}{}
		}
	}
}

func (w *Watcher) send(e Event) bool {
	select {
	case w.events <- e:
		return true
	case <-w.closing:
		return false
	}
}

// IsNetwork reports whether path is on a network file system: inotify does not
// see changes that other machines make.
func IsNetwork(path string) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return false, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	switch uint32(st.Type) { //nolint:gosec // the magic numbers are 32 bits wide
	case unix.NFS_SUPER_MAGIC, unix.SMB_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC, unix.CIFS_SUPER_MAGIC, unix.FUSE_SUPER_MAGIC:
		return true, nil
	}
	return false, nil
}
