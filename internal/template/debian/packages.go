package debian

import (
	"context"
	"crypto/md5" // only to compare conffiles with dpkg's records; not for security
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"bivy/internal/template/source"
	"bivy/internal/template/tree"
)

// generatedVersion is part of every key. It is increased when the generated files
// change.
const generatedVersion = 1

// Packages is a source: packages and their dependencies, as installed below a root
// directory of this host, with the accounts and configuration of a new system.
type Packages struct {
	root  string
	names []string

	host     *os.Root
	packages []*pkg
	aliases  map[string]string // top-level directories that are links into /usr
}

// New returns a source for the named packages of the system at root, which is "/"
// except in tests.
func New(root string, names []string) *Packages {
	return &Packages{root: root, names: names}
}

// String implements source.Source.
func (p *Packages) String() string {
	return fmt.Sprintf("host packages (%d and their dependencies)", len(p.names))
}

// Key implements source.Source. It is a hash of the names and versions of all
// packages; a file that was changed by hand on the host does not change it.
func (p *Packages) Key(context.Context) (string, error) {
	host, err := os.OpenRoot(p.root)
	if err != nil {
		return "", fmt.Errorf("host packages: %w", err)
	}
	p.host = host
	db, err := readDatabase(host)
	if err != nil {
		return "", err
	}
	if p.packages, err = db.closure(p.names); err != nil {
		return "", err
	}
	h := sha256.New()
	fmt.Fprintf(h, "generated %d\n", generatedVersion)
	for _, x := range p.packages {
		fmt.Fprintf(h, "%s %s %s\n", x.name, x.version, x.arch)
	}
	return "host packages sha256:" + hex.EncodeToString(h.Sum(nil)), nil
}

// Close implements source.Source.
func (p *Packages) Close() error {
	if p.host == nil {
		return nil
	}
	h := p.host
	p.host = nil
	return h.Close()
}

// mergedDirs are the directories that are links on a system with a merged /usr.
var mergedDirs = []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"}

// Load implements source.Source.
func (p *Packages) Load(ctx context.Context, t *tree.Tree, _ *tree.Spool, progress source.Progress) (source.Defaults, error) {
	if err := t.BeginLayer(""); err != nil {
		return source.Defaults{}, err
	}
	p.aliases = map[string]string{}
	for _, d := range mergedDirs {
		target, err := p.host.Readlink(d)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EINVAL) {
			continue
		}
		if err != nil {
			return source.Defaults{}, err
		}
		if target = strings.TrimPrefix(target, "/"); target != "usr/"+d {
			continue
		}
		p.aliases["/"+d] = "/" + target
		if err := t.Put(target, dirInode(0o755)); err != nil {
			return source.Defaults{}, err
		}
		if err := t.Put(d, linkInode(target)); err != nil {
			return source.Defaults{}, err
		}
	}
	c := &copier{ctx: ctx, host: p.host, tree: t, progress: progress, real: p.realPath, links: map[uint64]string{}}
	for _, x := range p.packages {
		if err := c.pkg(x); err != nil {
			return source.Defaults{}, fmt.Errorf("package %s: %w", x.name, err)
		}
	}
	if err := c.bytecode(); err != nil {
		return source.Defaults{}, err
	}
	if err := alternatives(p.host, t); err != nil {
		return source.Defaults{}, err
	}
	if err := certificates(t); err != nil {
		return source.Defaults{}, err
	}
	if err := generate(t, p.packages); err != nil {
		return source.Defaults{}, err
	}
	setMissingTimes(t)
	return source.Defaults{
		Env:     map[string]string{"PATH": defaultPath, "LANG": "C.UTF-8"},
		User:    userName,
		Workdir: userHome,
		Cmd:     []string{"/bin/bash", "-l"},
	}, nil
}

// realPath returns the path on the host of the file that dpkg lists as name.
func (p *Packages) realPath(name string) string {
	first, rest, ok := strings.Cut(name[1:], "/")
	if to, merged := p.aliases["/"+first]; merged {
		if !ok {
			return to
		}
		return to + "/" + rest
	}
	return name
}

// rule says what to do with a path that a package lists.
type rule int

const (
	keep     rule = iota // copy
	dirsOnly             // copy directories only: files are state of the host
	skip                 // do not copy
)

// rules lists path prefixes and the rule for everything at or below them. The
// longest match applies.
var rules = map[string]rule{
	"/boot/":  dirsOnly,
	"/dev/":   dirsOnly,
	"/home/":  dirsOnly,
	"/media/": dirsOnly,
	"/mnt/":   dirsOnly,
	"/proc/":  skip,
	"/root/":  skip,
	"/run/":   skip,
	"/srv/":   dirsOnly,
	"/sys/":   skip,
	"/tmp/":   skip,
	"/var/":   dirsOnly,

	"/etc/alternatives/":          skip, // created by function alternatives
	"/etc/bash_completion.d/":     skip,
	"/etc/rc0.d/":                 skip,
	"/etc/rc1.d/":                 skip,
	"/etc/rc2.d/":                 skip,
	"/etc/rc3.d/":                 skip,
	"/etc/rc4.d/":                 skip,
	"/etc/rc5.d/":                 skip,
	"/etc/rc6.d/":                 skip,
	"/etc/rcS.d/":                 skip,
	"/usr/lib/valgrind/":          skip,
	"/usr/share/applications/":    skip,
	"/usr/share/gitweb/":          skip,
	"/usr/share/pixmaps/":         skip,
	"/etc/apt/":                   skip, // may contain credentials and the mirrors of this host
	"/etc/cron.d/":                skip,
	"/etc/cron.daily/":            skip,
	"/etc/cron.weekly/":           skip,
	"/etc/init.d/":                skip,
	"/etc/kernel/":                skip,
	"/etc/logrotate.d/":           skip,
	"/etc/ssh/":                   skip,
	"/etc/ssl/certs/":             skip, // created by function certificates
	"/etc/ssl/private/":           skip,
	"/etc/systemd/":               skip,
	"/etc/update-motd.d/":         skip,
	"/usr/lib/systemd/":           skip,
	"/usr/lib/udev/":              skip,
	"/usr/lib/modules/":           skip,
	"/usr/lib/sysctl.d/":          skip,
	"/usr/lib/tmpfiles.d/":        skip,
	"/usr/share/bash-completion/": skip, // not read by a login shell
	"/usr/share/bug/":             skip,
	"/usr/share/doc/":             skip,
	"/usr/share/doc-base/":        skip,
	"/usr/share/groff/":           skip,
	"/usr/share/info/":            skip,
	"/usr/share/lintian/":         skip,
	"/usr/share/locale/":          skip,
	"/usr/share/man/":             skip,
	"/usr/share/menu/":            skip,
	"/usr/share/zsh/":             skip,
}

// ruleFor returns the rule of the longest matching prefix.
func ruleFor(name string) rule {
	for at := name + "/"; ; {
		if v, ok := rules[at]; ok {
			return v
		}
		cut := strings.LastIndexByte(strings.TrimSuffix(at, "/"), '/')
		if cut <= 0 {
			return keep
		}
		at = at[:cut+1]
	}
}

// perlHeader reports whether name is one of Perl's C headers, which are needed only
// to build modules and are a third of its size.
func perlHeader(name string) bool {
	return strings.HasSuffix(name, ".h") && strings.Contains(name, "/perl/") && strings.Contains(name, "/CORE/")
}

// copier copies the files of packages into a tree.
type copier struct {
	ctx      context.Context
	host     *os.Root
	tree     *tree.Tree
	progress source.Progress
	real     func(string) string
	done     int64
	links    map[uint64]string // first names of files with several names, by inode
	python   []string          // copied Python sources, see bytecode
}

func (c *copier) pkg(x *pkg) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	files, err := x.files(c.host)
	if err != nil {
		return err
	}
	for _, listed := range files {
		name := c.real(path.Clean(listed))
		v := ruleFor(name)
		if v == skip || perlHeader(name) {
			continue
		}
		fi, err := c.host.Lstat(name[1:])
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
			c.tree.Notes().Add("listed by a package but not on this host", name)
			continue
		}
		if err != nil {
			return err
		}
		if v == dirsOnly && !fi.IsDir() {
			continue
		}
		if strings.HasPrefix(name, "/etc/") && fi.Mode().IsRegular() {
			ok, err := c.unchanged(x, listed, name)
			if err != nil {
				return err
			}
			if !ok {
				continue
			}
		}
		if err := c.copy(name, fi); err != nil {
			return err
		}
	}
	return nil
}

// unchanged reports whether a file below /etc is a conffile with the content that
// the package installed. A changed one may contain anything.
func (c *copier) unchanged(x *pkg, listed, name string) (bool, error) {
	want, ok := x.conffiles[listed]
	if !ok {
		c.tree.Notes().Add("files below /etc that are not conffiles, left out", name)
		return false, nil
	}
	f, err := c.host.OpenFile(name[1:], os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return false, err
	}
	h := md5.New()
	_, err = io.Copy(h, f)
	if err := errors.Join(err, f.Close()); err != nil {
		return false, err
	}
	if hex.EncodeToString(h.Sum(nil)) != want {
		c.tree.Notes().Add("conffiles changed on this host, left out", name)
		return false, nil
	}
	return true, nil
}

// copy adds one file, directory or symlink of the host to the tree.
func (c *copier) copy(name string, fi fs.FileInfo) error {
	ino, err := source.HostInode(fi)
	if err != nil {
		return err
	}
	mapOwner(ino)
	switch {
	case ino.IsDir():
		// A directory's time depends on the installation.
		ino.Mtime, ino.MtimeNsec = 0, 0
		if have := c.tree.Lookup(name); have != nil && have.IsSymlink() {
			return nil // a directory of a merged /usr, listed by an old package
		}
	case ino.IsSymlink():
		if ino.Target, err = c.host.Readlink(name[1:]); err != nil {
			return err
		}
		ino.Mtime, ino.MtimeNsec = 0, 0
		if have := c.tree.Lookup(name); have != nil && have.IsDir() {
			return nil
		}
	case ino.IsRegular():
		st, ok := fi.Sys().(*syscall.Stat_t)
		if ok && st.Nlink > 1 {
			if first, seen := c.links[st.Ino]; seen {
				return c.tree.Link(name, first)
			}
			c.links[st.Ino] = name
		}
		if err := c.tree.ChargeBytes(name, ino.Size); err != nil {
			return err
		}
		if ino.Size > 0 {
			ino.Content = source.HostFile{Root: c.host, Name: name[1:], Info: fi}
		}
		c.done += ino.Size
		if c.progress != nil {
			c.progress(c.done, 0)
		}
		if strings.HasSuffix(name, ".py") && !slices.Contains(strings.Split(name, "/"), "__pycache__") {
			c.python = append(c.python, name)
		}
	default:
		c.tree.Notes().Add("neither files nor directories nor symlinks, left out", name)
		return nil
	}
	return c.tree.Put(name, ino)
}

// mapOwner keeps owners with fixed ids. Other ids differ between hosts: their files
// are given to root, without the setuid and setgid bits.
func mapOwner(ino *tree.Inode) {
	if !knownUID(ino.UID) {
		ino.UID = 0
		ino.Mode &^= unix.S_ISUID
	}
	if !knownGID(ino.GID) {
		ino.GID = 0
		ino.Mode &^= unix.S_ISGID
	}
}

// setMissingTimes sets the time of directories and generated files to that of the
// newest file, so that the same packages give the same image, and no file is from
// 1970, which some programs reject.
func setMissingTimes(t *tree.Tree) {
	var newest int64
	_ = t.Walk(func(_ string, ino *tree.Inode) error { // the function never fails
		newest = max(newest, ino.Mtime)
		return nil
	})
	_ = t.Walk(func(_ string, ino *tree.Inode) error {
		if ino.Mtime == 0 {
			ino.Mtime = newest
		}
		return nil
	})
}

func dirInode(mode uint32) *tree.Inode { return &tree.Inode{Mode: unix.S_IFDIR | mode} }

func linkInode(target string) *tree.Inode {
	return &tree.Inode{Mode: unix.S_IFLNK | 0o777, Target: target}
}

func fileInode(mode uint32, text string) *tree.Inode {
	ino := &tree.Inode{Mode: unix.S_IFREG | mode, Size: int64(len(text))}
	if text != "" {
		ino.Content = tree.Bytes(text)
	}
	return ino
}
