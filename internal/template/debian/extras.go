package debian

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

// bytecode copies the compiled form of every Python source in the tree, if this
// host has it and it is current. dpkg does not list these files, because they are
// made during installation. Without them a new sandbox compiles at every import.
func (c *copier) bytecode() error {
	listed := map[string][]string{} // names in a __pycache__, by its path
	for _, name := range c.python {
		if err := c.ctx.Err(); err != nil {
			return err
		}
		cache := path.Join(path.Dir(name), "__pycache__")
		names, ok := listed[cache]
		if !ok {
			var err error
			if names, err = readNames(c.host, cache[1:]); err != nil {
				return err
			}
			listed[cache] = names
		}
		stem := strings.TrimSuffix(path.Base(name), ".py") + ".cpython-"
		for _, n := range names {
			version, ok := strings.CutPrefix(n, stem)
			if !ok || strings.Count(version, ".") != 1 || !strings.HasSuffix(version, ".pyc") {
				continue
			}
			if err := c.pyc(cache+"/"+n, c.tree.Lookup(name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// pyc copies one compiled file if its header has the time and size of src.
func (c *copier) pyc(name string, src *tree.Inode) error {
	fi, err := c.host.Lstat(name[1:])
	if err != nil || !fi.Mode().IsRegular() || src == nil {
		return err
	}
	f, err := c.host.OpenFile(name[1:], os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	var head [16]byte // magic, flags, source time, source size: PEP 552
	_, err = io.ReadFull(f, head[:])
	if cerr := f.Close(); cerr != nil {
		return cerr
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil // incomplete; Python ignores it too
	}
	if err != nil {
		return err
	}
	le := binary.LittleEndian
	if le.Uint32(head[4:]) != 0 || le.Uint32(head[8:]) != uint32(src.Mtime) || le.Uint32(head[12:]) != uint32(src.Size) {
		return nil
	}
	if err := c.copy(name, fi); err != nil {
		return err
	}
	// The time of compilation differs between hosts and is not in the content.
	made := c.tree.Lookup(name)
	made.Mtime, made.MtimeNsec = src.Mtime, 0
	return nil
}

// readNames lists a directory of the host; one that is missing is empty.
func readNames(root *os.Root, name string) ([]string, error) {
	f, err := root.Open(name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	names, err := f.Readdirnames(-1)
	slices.Sort(names)
	return names, errors.Join(err, f.Close())
}

const alternativesDir = "var/lib/dpkg/alternatives"

// alternatives creates the links of update-alternatives whose targets are in the
// image: the host's choice if possible, otherwise the one with the highest
// priority.
func alternatives(host *os.Root, t *tree.Tree) error {
	names, err := readNames(host, alternativesDir)
	if err != nil {
		return fmt.Errorf("alternatives: %w", err)
	}
	for _, n := range names {
		b, err := readSmall(host, alternativesDir+"/"+n)
		if err != nil {
			return fmt.Errorf("alternatives: %s: %w", n, err)
		}
		a, err := parseAlternative(n, b)
		if err != nil {
			return fmt.Errorf("alternatives: %s: %w", n, err)
		}
		current, err := host.Readlink("etc/alternatives/" + n)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("alternatives: %s: %w", n, err)
		}
		choice := a.choose(current, func(p string) bool { return t.Stat(p) != nil })
		if choice == nil {
			continue
		}
		for i, l := range a.links {
			target := choice.paths[i]
			if target == "" || ruleFor(l.path) == skip || t.Stat(target) == nil || t.Lookup(l.path) != nil {
				continue
			}
			if err := t.Put("/etc/alternatives/"+l.name, linkInode(target)); err != nil {
				return err
			}
			if err := t.Put(l.path, linkInode("/etc/alternatives/"+l.name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// alternative is one file of update-alternatives: links that change together, and
// their possible targets.
type alternative struct {
	links   []altLink // the main one first
	choices []altChoice
}

type altLink struct{ name, path string }

type altChoice struct {
	paths    []string // one for each link; empty where the choice has none, except the first
	priority int
}

// parseAlternative reads a file in the format of update-alternatives(1): the
// mode, the main link, pairs of a further link's name and path, an empty line;
// then for each choice its path, its priority and a path for each further
// link; an empty line ends it.
func parseAlternative(name string, data []byte) (*alternative, error) {
	bad := func(why string) error { return kind.Errorf(kind.Invalid, "not a file of update-alternatives: %s", why) }
	lines := strings.Split(strings.TrimSuffix(string(data), "\n"), "\n")
	next := func() (string, bool) {
		if len(lines) == 0 {
			return "", false
		}
		l := lines[0]
		lines = lines[1:]
		return l, true
	}
	if _, ok := next(); !ok {
		return nil, bad("it is empty")
	}
	link, ok := next()
	if !ok || !path.IsAbs(link) {
		return nil, bad("no main link")
	}
	a := &alternative{links: []altLink{{name, link}}}
	for {
		n, ok := next()
		if !ok {
			return nil, bad("unterminated list of links")
		}
		if n == "" {
			break
		}
		p, ok := next()
		if !ok || !path.IsAbs(p) || strings.Contains(n, "/") {
			return nil, bad("a link without a path")
		}
		a.links = append(a.links, altLink{n, p})
	}
	for {
		p, ok := next()
		if !ok || p == "" {
			return a, nil
		}
		if !path.IsAbs(p) {
			return nil, bad("the path of a choice is not absolute")
		}
		prio, _ := next()
		n, err := strconv.Atoi(prio)
		if err != nil {
			return nil, bad("a choice without a priority")
		}
		c := altChoice{paths: []string{p}, priority: n}
		for range a.links[1:] {
			s, ok := next()
			if !ok || s != "" && !path.IsAbs(s) {
				return nil, bad("a choice with too few paths")
			}
			c.paths = append(c.paths, s)
		}
		a.choices = append(a.choices, c)
	}
}

func (a *alternative) choose(current string, have func(string) bool) *altChoice {
	var best *altChoice
	for i := range a.choices {
		c := &a.choices[i]
		if !have(c.paths[0]) {
			continue
		}
		if c.paths[0] == current {
			return c
		}
		if best == nil || c.priority > best.priority {
			best = c
		}
	}
	return best
}

// maxSmall is the largest size in bytes of files that are read into memory.
const maxSmall = 1 << 20

func readSmall(root *os.Root, name string) ([]byte, error) {
	f, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSmall+1))
	if err == nil && len(b) > maxSmall {
		err = fmt.Errorf("exceeds %d bytes", maxSmall)
	}
	return b, err
}

const (
	certDir    = "/usr/share/ca-certificates"
	certBundle = "/etc/ssl/certs/ca-certificates.crt"
)

// certificates creates the bundle of update-ca-certificates from the certificates
// in the tree. Certificates that the administrator of this host added or
// deselected are local configuration and have no effect.
func certificates(t *tree.Tree) error {
	top := t.Lookup(certDir)
	if top == nil || !top.IsDir() {
		return nil
	}
	var bundle bytes.Buffer
	var add func(dir *tree.Inode) error
	add = func(dir *tree.Inode) error {
		for _, n := range dir.Names() {
			ino := dir.Child(n)
			switch {
			case ino.IsDir():
				if err := add(ino); err != nil {
					return err
				}
			case ino.IsRegular() && strings.HasSuffix(n, ".crt") && ino.Size > 0 && ino.Size <= maxSmall:
				if err := appendCert(&bundle, ino); err != nil {
					return fmt.Errorf("certificate %s: %w", n, err)
				}
			}
		}
		return nil
	}
	if err := add(top); err != nil {
		return err
	}
	return t.Put(certBundle, fileInode(0o644, bundle.String()))
}

func appendCert(to *bytes.Buffer, ino *tree.Inode) error {
	r, err := ino.Content.Open()
	if err != nil {
		return err
	}
	sc := bufio.NewScanner(io.LimitReader(r, maxSmall))
	for sc.Scan() {
		to.WriteString(strings.TrimRight(sc.Text(), "\r"))
		to.WriteByte('\n')
	}
	return errors.Join(sc.Err(), r.Close())
}
