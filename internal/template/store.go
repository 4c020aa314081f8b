package template

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"bivy/internal/dirlock"
	"bivy/internal/durable"
	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

// The store's directory:
//
//	lock                              held while a Store is open, see package dirlock
//	version                           the version of this layout
//	<template hex>/template.json      what the template is; never changes
//	<template hex>/<image hex>.erofs  its image; never changes
//	<template hex>/leases/<holder>    one file per lease
//	<template hex>/snapshots/         snapshots, see package snapshot
//	refs/<namespace or _>/<name>/<tag>  a template's digest
//	builds/<key>                      the digest that a build with that key produced
//	tmp/                              unfinished builds; emptied by Open
//
// A template's directory is created in tmp and renamed into place when it is
// complete, and renamed back to tmp before it is removed, so that after a crash
// the store has all of it or none. Templates with the same image share one file by
// hard link, and with it the page cache.
const (
	versionFile  = "version"
	refsDir      = "refs"
	buildsDir    = "builds"
	tmpDir       = "tmp"
	leasesDir    = "leases"
	snapshotsDir = "snapshots"
	metaFile     = "template.json"

	storeVersion = 1
	maxMetaBytes = 1 << 20 // of template.json
)

// DefaultGrace is how long GC keeps a template that has neither a name nor a
// lease: the caller that built it may be about to take a lease.
const DefaultGrace = 10 * time.Minute

// Extra is a file that the store adds to every image. It replaces what the source
// has at its path. Missing parent directories belong to root.
type Extra struct {
	Path string      // absolute, in the image
	Mode fs.FileMode // permissions; the owner is root
	Open func() (io.ReadCloser, error)
}

// Options are what a Store needs besides its directory. The zero value works.
type Options struct {
	Extra     []Extra           // e.g. the guest agent
	Limits    tree.Limits       // of one image; zero fields have defaults
	HostRoot  string            // where host packages are read from; empty: "/"
	Transport http.RoundTripper // for registries; nil: the HTTP default
	Grace     time.Duration     // zero: DefaultGrace; negative: none
	Now       func() time.Time  // nil: time.Now
	Log       *slog.Logger      // nil: discarded
	Getenv    func(string) string
}

// Store keeps templates in a directory that it alone uses. Its methods may be
// called concurrently.
type Store struct {
	dir  string
	root *os.Root
	lock *dirlock.Lock
	opts Options

	// mu guards names, leases, and adding and removing templates. It is not held
	// while an image is built.
	mu sync.Mutex

	// runningMu guards running, the builds in progress by key.
	runningMu sync.Mutex
	running   map[string]*sharedBuild
}

// Open opens the store in dir, which it creates if necessary, and removes what a
// killed process left unfinished. It fails with kind.Conflict when another Store
// has the directory open, or when its layout is of another version of bivy.
func Open(dir string, opts Options) (*Store, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("template store: %w", err)
	}
	if err := os.MkdirAll(abs, 0o700); err != nil {
		return nil, fmt.Errorf("template store: %w", err)
	}
	root, err := os.OpenRoot(abs)
	if err != nil {
		return nil, fmt.Errorf("template store: %w", err)
	}
	s := &Store{dir: abs, root: root, opts: opts, running: map[string]*sharedBuild{}}
	if s.opts.Now == nil {
		s.opts.Now = time.Now
	}
	if s.opts.Log == nil {
		s.opts.Log = slog.New(slog.DiscardHandler)
	}
	if s.opts.HostRoot == "" {
		s.opts.HostRoot = "/"
	}
	if s.opts.Getenv == nil {
		s.opts.Getenv = func(string) string { return "" }
	}
	if s.opts.Grace == 0 {
		s.opts.Grace = DefaultGrace
	}
	if err := s.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("template store %s: %w", abs, err), s.Close())
	}
	return s, nil
}

func (s *Store) open() error {
	lock, err := dirlock.Acquire(s.dir)
	if err != nil {
		if kind.Is(err, kind.Conflict) {
			return kind.Errorf(kind.Conflict, "%w", err).WithHint("stop the other bivy, or give this one another data directory")
		}
		return err
	}
	s.lock = lock
	if err := s.checkVersion(); err != nil {
		return err
	}
	if err := s.root.RemoveAll(tmpDir); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	for _, d := range []string{tmpDir, refsDir, buildsDir} {
		if err := s.root.Mkdir(d, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return errors.Join(s.sweepBroken(), s.sweepNames())
}

// sweepBroken removes templates that cannot be used, such as those whose image was
// deleted by hand or truncated by a full disk, so that the next build creates them
// again. It keeps templates with a lease, because something may still run from them.
func (s *Store) sweepBroken() error {
	digests, err := s.digestsLocked()
	if err != nil {
		return err
	}
	for _, d := range digests {
		_, broken := s.load(d)
		if broken == nil || kind.Is(broken, kind.Conflict) {
			continue
		}
		leases, err := s.leasesLocked(d)
		if err != nil {
			return err
		}
		s.opts.Log.Warn("broken template", "template", d, "leases", leases, "error", broken)
		if len(leases) > 0 {
			continue
		}
		if err := s.discardLocked(d); err != nil {
			return err
		}
	}
	return nil
}

// checkVersion reads the layout's version, or writes it into a new store.
func (s *Store) checkVersion() error {
	want := fmt.Sprintf("bivy templates %d\n", storeVersion)
	b, err := readFile(s.root, versionFile, 64)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := durable.WriteFileIn(s.root, versionFile, []byte(want), 0o600); err != nil {
			return fmt.Errorf("version: %w", err)
		}
		return nil
	case err != nil && !errors.Is(err, errTooLong):
		return fmt.Errorf("version: %w", err)
	case err == nil && string(b) == want:
		return nil
	}
	return kind.Errorf(kind.Conflict, "unsupported layout %q; this bivy reads %q", strings.TrimSpace(string(b)), strings.TrimSpace(want)).
		WithHint("use the bivy that created it, or another data directory")
}

// sweepNames removes names and build keys whose template does not exist, as after
// an interrupted removal. It keeps those that cannot be read, because the cause may
// be temporary.
func (s *Store) sweepNames() error {
	for _, dir := range []string{refsDir, buildsDir} {
		err := fs.WalkDir(s.root.FS(), dir, func(name string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			if durable.IsTemp(d.Name()) {
				return s.root.Remove(name)
			}
			digest, err := s.readDigest(name)
			if err == nil {
				_, err = s.root.Lstat(digest.Hex())
			}
			switch {
			case err == nil:
				return nil
			case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errTooLong) && !errors.Is(err, errNoDigest):
				s.opts.Log.Warn("cannot read a template name", "file", name, "error", err)
				return nil
			}
			s.opts.Log.Info("removed the name of a missing template", "file", name, "error", err)
			return s.root.Remove(name)
		})
		if err != nil {
			return fmt.Errorf("clean up %s: %w", dir, err)
		}
	}
	return nil
}

// Close releases the directory. Builds must have ended.
func (s *Store) Close() error {
	var errs []error
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
	}
	return errors.Join(append(errs, s.root.Close())...)
}

// meta is the content of template.json. The digest of a template covers only the
// fields image and config, see templateDigest.
type meta struct {
	Version    int       `json:"version"`
	Image      Digest    `json:"image"`
	ImageBytes int64     `json:"image_bytes"`
	Config     Config    `json:"config"`
	Source     string    `json:"source"`
	Created    time.Time `json:"created"`
	Notes      []string  `json:"notes,omitempty"`
}

// load reads the template called digest.
func (s *Store) load(digest Digest) (Template, error) {
	missing := kind.Errorf(kind.NotFound, "template %s does not exist", digest)
	b, err := readFile(s.root, digest.Hex()+"/"+metaFile, maxMetaBytes)
	if errors.Is(err, fs.ErrNotExist) {
		return Template{}, missing
	}
	if err != nil {
		return Template{}, fmt.Errorf("template %s: %w", digest, err)
	}
	var m meta
	if err := json.Unmarshal(b, &m); err != nil {
		return Template{}, fmt.Errorf("template %s: %s: %w", digest, metaFile, err)
	}
	if m.Version != storeVersion {
		return Template{}, kind.Errorf(kind.Conflict, "template %s: version %d; this bivy reads version %d", digest, m.Version, storeVersion)
	}
	if got, err := templateDigest(m.Image, m.Config); err != nil || got != digest {
		return Template{}, fmt.Errorf("template %s: %s describes another template (%s)", digest, metaFile, got)
	}
	image := digest.Hex() + "/" + m.Image.Hex() + ".erofs"
	switch fi, err := s.root.Lstat(image); {
	case errors.Is(err, fs.ErrNotExist):
		return Template{}, fmt.Errorf("template %s: its image is missing", digest)
	case err != nil:
		return Template{}, fmt.Errorf("template %s: %w", digest, err)
	case fi.Size() != m.ImageBytes:
		return Template{}, fmt.Errorf("template %s: its image has %d bytes, want %d", digest, fi.Size(), m.ImageBytes)
	}
	return Template{
		Digest:      digest,
		ImageDigest: m.Image,
		Image:       filepath.Join(s.dir, image),
		ImageBytes:  m.ImageBytes,
		Dir:         filepath.Join(s.dir, digest.Hex()),
		Config:      m.Config,
		Source:      m.Source,
		Created:     m.Created,
		Notes:       m.Notes,
	}, nil
}

// Get returns a template by name or digest; kind.NotFound when there is none.
func (s *Store) Get(nameOrDigest string) (Template, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.getLocked(nameOrDigest)
}

func (s *Store) getLocked(nameOrDigest string) (Template, error) {
	if shortDigest.MatchString(nameOrDigest) {
		d, err := s.completeLocked(nameOrDigest)
		if err != nil {
			return Template{}, err
		}
		return s.load(d)
	}
	ref, err := ParseRef(nameOrDigest)
	if err != nil {
		return Template{}, err
	}
	d, err := s.readDigest(ref.file())
	if errors.Is(err, fs.ErrNotExist) {
		return Template{}, kind.Errorf(kind.NotFound, "template %s does not exist", ref).
			WithHint("see bivy template ls")
	}
	if err != nil {
		return Template{}, fmt.Errorf("template %s: %w", ref, err)
	}
	return s.load(d)
}

// completeLocked returns the digest that begins with begin, which listings show
// abbreviated. A complete digest is returned as it is.
func (s *Store) completeLocked(begin string) (Digest, error) {
	if d, err := parseDigest(begin); err == nil {
		return d, nil
	}
	all, err := s.digestsLocked()
	if err != nil {
		return "", err
	}
	all = slices.DeleteFunc(all, func(d Digest) bool { return !strings.HasPrefix(string(d), begin) })
	switch len(all) {
	case 0:
		return "", kind.Errorf(kind.NotFound, "template %s does not exist", begin).
			WithHint("see bivy template ls")
	case 1:
		return all[0], nil
	}
	return "", kind.Errorf(kind.Invalid, "%d templates begin with %s", len(all), begin).WithHint("give more digits of the digest")
}

// Verify reads a template's image and compares it with its digest.
func (s *Store) Verify(ctx context.Context, digest Digest) error {
	s.mu.Lock()
	t, err := s.load(digest)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	f, err := os.Open(t.Image)
	if err != nil {
		return fmt.Errorf("template %s: %w", digest, err)
	}
	defer f.Close()
	h := sha256.New()
	buf := make([]byte, 1<<20)
	for {
		if err := ctx.Err(); err != nil {
			return kind.Wrap(kind.Unavailable, err)
		}
		n, err := f.Read(buf)
		h.Write(buf[:n])
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("template %s: %w", digest, err)
		}
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != t.ImageDigest.Hex() {
		return kind.Errorf(kind.Conflict, "template %s: its image has digest sha256:%s, want %s", digest, got, t.ImageDigest).
			WithHint("remove it and build it again")
	}
	return nil
}

// Listed is a template with its names and leases.
type Listed struct {
	Template
	Names  []Ref    // sorted
	Leases []string // sorted
	Broken error    // why it cannot be used, or nil; if set, only Digest is set besides
}

// List returns every template, oldest first.
func (s *Store) List() ([]Listed, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.listLocked()
}

func (s *Store) listLocked() ([]Listed, error) {
	digests, err := s.digestsLocked()
	if err != nil {
		return nil, err
	}
	names, err := s.namesLocked()
	if err != nil {
		return nil, err
	}
	var out []Listed
	for _, d := range digests {
		t, broken := s.load(d)
		t.Digest = d
		leases, err := s.leasesLocked(d)
		if err != nil {
			return nil, err
		}
		out = append(out, Listed{Template: t, Names: names[d], Leases: leases, Broken: broken})
	}
	slices.SortStableFunc(out, func(a, b Listed) int { return a.Created.Compare(b.Created) })
	return out, nil
}

// digestsLocked returns the templates on disk, sorted.
func (s *Store) digestsLocked() ([]Digest, error) {
	entries, err := fs.ReadDir(s.root.FS(), ".")
	if err != nil {
		return nil, fmt.Errorf("templates: %w", err)
	}
	var out []Digest
	for _, e := range entries {
		if e.IsDir() && hex64.MatchString(e.Name()) {
			out = append(out, Digest("sha256:"+e.Name()))
		}
	}
	return out, nil
}

// namesLocked returns the names of every template.
func (s *Store) namesLocked() (map[Digest][]Ref, error) {
	out := map[Digest][]Ref{}
	err := fs.WalkDir(s.root.FS(), refsDir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		parts := strings.Split(name, "/")
		if len(parts) != 4 {
			return fmt.Errorf("%s is not the file of a template name", name)
		}
		ref := Ref{Name: parts[2], Tag: parts[3]}
		if parts[1] != "_" {
			ref.Name = parts[1] + "/" + parts[2]
		}
		digest, err := s.readDigest(name)
		if err != nil {
			return err
		}
		out[digest] = append(out[digest], ref)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("template names: %w", err)
	}
	return out, nil
}

// SetName gives the template a name. If another template has that name, it loses it.
func (s *Store) SetName(name string, digest Digest) error {
	ref, err := ParseRef(name)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.load(digest); err != nil {
		return err
	}
	return s.setNameLocked(ref, digest)
}

func (s *Store) setNameLocked(ref Ref, digest Digest) error {
	if err := s.root.MkdirAll(ref.dir(), 0o700); err != nil {
		return fmt.Errorf("template name %s: %w", ref, err)
	}
	if err := s.writeFile(ref.file(), []byte(string(digest)+"\n")); err != nil {
		return fmt.Errorf("template name %s: %w", ref, err)
	}
	return nil
}

// Remove removes a name, or with a digest the template and all its names. It fails
// with kind.Conflict when that would remove a template in use. A template that has
// lost its last name is removed by GC.
func (s *Store) Remove(nameOrDigest string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	t, err := s.getLocked(nameOrDigest)
	if err != nil {
		return err
	}
	leases, err := s.leasesLocked(t.Digest)
	if err != nil {
		return err
	}
	names, err := s.namesLocked()
	if err != nil {
		return err
	}
	ref, err := ParseRef(nameOrDigest)
	byName := err == nil
	if len(leases) > 0 && (!byName || len(names[t.Digest]) == 1) {
		return kind.Errorf(kind.Conflict, "template %s is in use by %s", nameOrDigest, strings.Join(leases, ", ")).
			WithHint("end the sessions that use it first")
	}
	if byName {
		return durable.RemoveIn(s.root, ref.file())
	}
	for _, n := range names[t.Digest] {
		if err := durable.RemoveIn(s.root, n.file()); err != nil {
			return err
		}
	}
	return s.discardLocked(t.Digest)
}

// discardLocked removes a template's directory. It renames it first, so that it
// disappears in one step.
func (s *Store) discardLocked(digest Digest) error {
	trash := tmpDir + "/trash-" + digest.Hex()
	if err := s.root.RemoveAll(trash); err != nil {
		return fmt.Errorf("template %s: %w", digest, err)
	}
	if err := s.root.Rename(digest.Hex(), trash); err != nil {
		return fmt.Errorf("template %s: %w", digest, err)
	}
	if err := durable.SyncDirIn(s.root, "."); err != nil {
		return fmt.Errorf("template %s: %w", digest, err)
	}
	if err := s.root.RemoveAll(trash); err != nil {
		return fmt.Errorf("template %s: %w", digest, err)
	}
	return nil
}

// Collected is what a GC removed.
type Collected struct {
	Digests []Digest
	Bytes   int64 // sum of the image sizes; less is freed when images are shared
}

// GC removes every template without a name and without a lease, except those
// younger than the grace period.
func (s *Store) GC(ctx context.Context) (Collected, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out Collected
	list, err := s.listLocked()
	if err != nil {
		return out, err
	}
	for _, t := range list {
		if len(t.Names) > 0 || len(t.Leases) > 0 || s.youngLocked(t.Digest) {
			continue
		}
		if err := ctx.Err(); err != nil {
			return out, err
		}
		if err := s.discardLocked(t.Digest); err != nil {
			return out, err
		}
		out.Digests = append(out.Digests, t.Digest)
		out.Bytes += t.ImageBytes
	}
	return out, s.sweepNames()
}

// youngLocked reports whether a build has returned digest within the grace period.
// Each build sets the modification time of the leases directory.
func (s *Store) youngLocked(digest Digest) bool {
	fi, err := s.root.Stat(digest.Hex() + "/" + leasesDir)
	if err != nil || s.opts.Grace < 0 {
		return false
	}
	return s.opts.Now().Sub(fi.ModTime()) < s.opts.Grace
}
