package template

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/durable"
	"bivy/internal/kind"
	"bivy/internal/template/image"
	"bivy/internal/template/source"
	"bivy/internal/template/tree"
)

// formatVersion is part of every build key; it grows when the same input would
// give another image.
const formatVersion = 1

// Build makes the template that spec describes and gives it the spec's name.
// What was built from the same content before is found, not built again, and
// concurrent builds of the same thing are one. The build stops when the last
// caller that waits for it is gone. Nothing half-made is left after a failure.
// progress may be nil.
//
// The template is kept for the grace period even without a name. A caller that
// uses it longer takes a lease within that time.
func (s *Store) Build(ctx context.Context, spec Spec, progress Progress) (Template, error) {
	t, err := s.buildDigest(ctx, spec, progress)
	if err != nil {
		label := spec.Name
		if label == "" {
			label = "from " + spec.From.Kind()
		}
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			return Template{}, kind.Errorf(kind.Exhausted, "template %s: %w", label, err).WithHint("make room below %s, e.g. by removing templates that nothing uses", s.dir)
		}
		return Template{}, fmt.Errorf("template %s: %w", label, err)
	}
	if spec.Name != "" {
		if err := s.SetName(spec.Name, t.Digest); err != nil {
			return Template{}, err
		}
	}
	return t, nil
}

func (s *Store) buildDigest(ctx context.Context, spec Spec, progress Progress) (Template, error) {
	if err := spec.Validate(); err != nil {
		return Template{}, err
	}
	src, err := s.source(spec.From)
	if err != nil {
		return Template{}, err
	}
	sourceKey, err := src.Key(ctx)
	if err != nil {
		return Template{}, errors.Join(err, src.Close())
	}
	key, err := s.key(spec, sourceKey)
	if err != nil {
		return Template{}, errors.Join(err, src.Close())
	}
	cached := sourceKey != ""
	if cached {
		t, err := s.built(key)
		if err == nil || !kind.Is(err, kind.NotFound) {
			return t, errors.Join(err, src.Close())
		}
	}
	f, id, leader := s.join(key, progress)
	if !leader {
		if err := src.Close(); err != nil {
			s.leave(f, id)
			return Template{}, err
		}
		return s.wait(ctx, f, id)
	}
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	f.cancel = cancel
	close(f.started)
	go func() { // every caller waits for it; the last to leave cancels it first
		defer cancel()
		t, err := s.build(work, spec, src, f.report)
		if err == nil && cached {
			err = s.writeFile(buildsDir+"/"+key, []byte(string(t.Digest)+"\n"))
		}
		s.land(key, f, t, errors.Join(err, src.Close()))
	}()
	return s.wait(ctx, f, id)
}

// built finds what a build with the same key gave before.
func (s *Store) built(key string) (Template, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	digest, err := s.readDigest(buildsDir + "/" + key)
	if errors.Is(err, fs.ErrNotExist) {
		return Template{}, kind.Errorf(kind.NotFound, "build %s was not made yet", key)
	}
	if err != nil {
		return Template{}, fmt.Errorf("build %s: %w", key, err)
	}
	t, err := s.load(digest)
	if err != nil {
		if !kind.Is(err, kind.NotFound) {
			s.opts.Log.Warn("broken template is built again", "template", digest, "error", err)
		}
		return Template{}, kind.Errorf(kind.NotFound, "build %s: %w", key, err)
	}
	return t, s.touch(digest)
}

// touch starts the grace period of a template that a build gives out.
func (s *Store) touch(digest Digest) error {
	now := s.opts.Now()
	return s.root.Chtimes(digest.Hex()+"/"+leasesDir, now, now)
}

// key hashes everything that decides what a build gives, the name excluded.
// Without a source key it hashes the spec, which is good for joining a build
// that is running and no more.
func (s *Store) key(spec Spec, sourceKey string) (string, error) {
	type extra struct {
		Path string
		Mode fs.FileMode
		Hash string
	}
	in := struct {
		Format int
		Source string
		From   From
		Config Config
		Extra  []extra
	}{Format: formatVersion, Source: sourceKey, Config: Config{Env: spec.Env, User: spec.User, Workdir: spec.Workdir, Cmd: spec.Cmd}}
	if sourceKey == "" {
		in.From = spec.From
	}
	for _, x := range s.opts.Extra {
		r, err := x.Open()
		if err != nil {
			return "", fmt.Errorf("%s: %w", x.Path, err)
		}
		h := sha256.New()
		_, err = io.Copy(h, r)
		if err := errors.Join(err, r.Close()); err != nil {
			return "", fmt.Errorf("%s: %w", x.Path, err)
		}
		in.Extra = append(in.Extra, extra{x.Path, x.Mode, hex.EncodeToString(h.Sum(nil))})
	}
	b, err := json.Marshal(in)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

// templateDigest names a template.
func templateDigest(imageDigest Digest, config Config) (Digest, error) {
	b, err := json.Marshal(struct {
		Image  Digest `json:"image"`
		Config Config `json:"config"`
	}{imageDigest, config})
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return Digest("sha256:" + hex.EncodeToString(sum[:])), nil
}

// build does the work of one build in a directory of its own below tmp.
func (s *Store) build(ctx context.Context, spec Spec, src source.Source, report Progress) (_ Template, err error) {
	work := tmpDir + "/build-" + rand.Text()
	if err := s.root.Mkdir(work, 0o700); err != nil {
		return Template{}, err
	}
	defer func() { err = errors.Join(err, s.root.RemoveAll(work)) }()
	spoolFile, err := s.root.OpenFile(work+"/spool", unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return Template{}, err
	}
	defer func() { err = errors.Join(err, spoolFile.Close()) }()
	// Unlinked at once: its space goes back with the process, come what may.
	if err := s.root.Remove(work + "/spool"); err != nil {
		return Template{}, err
	}
	spool := tree.NewSpool(spoolFile)

	phase := func(name string) func(done, total int64) {
		return func(done, total int64) { report(Event{Phase: name, Done: done, Total: total}) }
	}
	t := tree.New(s.opts.Limits)
	defaults, err := src.Load(ctx, t, spool, phase("read"))
	if err != nil {
		return Template{}, err
	}
	if err := t.BeginLayer("what bivy adds"); err != nil {
		return Template{}, err
	}
	if err := addSkeleton(t); err != nil {
		return Template{}, err
	}
	for _, x := range s.opts.Extra {
		if err := addExtra(t, spool, x); err != nil {
			return Template{}, fmt.Errorf("%s: %w", x.Path, err)
		}
	}
	made, err := s.root.OpenRoot(work)
	if err != nil {
		return Template{}, err
	}
	defer func() { err = errors.Join(err, made.Close()) }()
	img, err := image.Write(ctx, made, t, phase("write"))
	if err != nil {
		return Template{}, err
	}
	return s.install(ctx, work, meta{
		Version:    storeVersion,
		Image:      Digest("sha256:" + img.Hex),
		ImageBytes: img.Bytes,
		Config:     merge(defaults, spec),
		Source:     src.String(),
		Created:    s.opts.Now().UTC().Truncate(time.Second),
		Notes:      t.Notes().List(),
	})
}

// merge lays what the spec says over what the source says.
func merge(d source.Defaults, spec Spec) Config {
	c := Config{User: d.User, Workdir: d.Workdir, Cmd: d.Cmd}
	if len(d.Env)+len(spec.Env) > 0 {
		c.Env = map[string]string{}
		maps.Copy(c.Env, d.Env)
		maps.Copy(c.Env, spec.Env)
	}
	if spec.User != "" {
		c.User = spec.User
	}
	if spec.Workdir != "" {
		c.Workdir = spec.Workdir
	}
	if len(spec.Cmd) > 0 {
		c.Cmd = spec.Cmd
	}
	return c
}

// addSkeleton makes sure of the directories that a sandbox mounts over and of
// the files that name lookups expect; an image made for another runtime often
// leaves them to it.
//
// /tmp is never empty: over an empty one gVisor mounts a file system of its
// own, outside the session's disk limit and outside the list of what the
// session changed. The directory is the one that Debian's systems have there.
func addSkeleton(t *tree.Tree) error {
	for _, d := range []struct {
		name string
		mode uint32
	}{{"/proc", 0o555}, {"/sys", 0o555}, {"/dev", 0o755}, {"/run", 0o755}, {"/etc", 0o755}, {"/tmp", 0o1777}, {"/tmp/.X11-unix", 0o1777}} {
		if at := t.Stat(d.name); at != nil && at.IsDir() {
			continue
		}
		if err := t.Put(d.name, &tree.Inode{Mode: unix.S_IFDIR | d.mode}); err != nil {
			return err
		}
	}
	for name, text := range map[string]string{
		"/etc/hosts":       "127.0.0.1\tlocalhost bivy\n::1\tlocalhost ip6-localhost ip6-loopback\n",
		"/etc/resolv.conf": "",
	} {
		if t.Lookup(name) != nil {
			continue
		}
		ino := &tree.Inode{Mode: unix.S_IFREG | 0o644, Size: int64(len(text))}
		if text != "" {
			ino.Content = tree.Bytes(text)
		}
		if err := t.Put(name, ino); err != nil {
			return err
		}
	}
	return nil
}

// addExtra puts one of the store's own files into the image, in directories
// that only root may change whatever the source says of them.
func addExtra(t *tree.Tree, spool *tree.Spool, x Extra) error {
	if !path.IsAbs(x.Path) || path.Clean(x.Path) != x.Path || x.Path == "/" {
		return kind.Errorf(kind.Invalid, "not a clean absolute path")
	}
	r, err := x.Open()
	if err != nil {
		return err
	}
	content, size, err := spool.AddAll(r, t.Limits().Bytes)
	if err := errors.Join(err, r.Close()); err != nil {
		return err
	}
	if err := t.ChargeBytes(x.Path, size); err != nil {
		return err
	}
	if err := t.Protect(path.Dir(x.Path)); err != nil {
		return err
	}
	if err := t.Remove(x.Path); err != nil {
		return err
	}
	return t.Put(x.Path, &tree.Inode{Mode: unix.S_IFREG | uint32(x.Mode.Perm()), Size: size, Content: content})
}

// install moves a finished build to its place, unless the same template is
// there already.
func (s *Store) install(ctx context.Context, work string, m meta) (Template, error) {
	digest, err := templateDigest(m.Image, m.Config)
	if err != nil {
		return Template{}, err
	}
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return Template{}, err
	}
	if err := s.writeFile(work+"/"+metaFile, append(b, '\n')); err != nil {
		return Template{}, err
	}
	if err := s.root.Mkdir(work+"/"+leasesDir, 0o700); err != nil {
		return Template{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return Template{}, err
	}
	if t, err := s.load(digest); err == nil {
		return t, s.touch(digest)
	} else if !kind.Is(err, kind.NotFound) {
		if err := s.replaceLocked(digest, err); err != nil {
			return Template{}, err
		}
	}
	if err := s.shareImage(work, m.Image); err != nil {
		return Template{}, err
	}
	if err := durable.SyncDirIn(s.root, work); err != nil {
		return Template{}, err
	}
	if err := s.root.Rename(work, digest.Hex()); err != nil {
		return Template{}, err
	}
	if err := durable.SyncDirIn(s.root, "."); err != nil {
		return Template{}, err
	}
	if err := s.touch(digest); err != nil {
		return Template{}, err
	}
	return s.load(digest)
}

// replaceLocked makes room for a template that is there but broken, unless
// something may still run from it.
func (s *Store) replaceLocked(digest Digest, broken error) error {
	leases, err := s.leasesLocked(digest)
	if err != nil {
		return err
	}
	if len(leases) > 0 {
		return kind.Errorf(kind.Conflict, "%w, and it is in use by %s", broken, strings.Join(leases, ", "))
	}
	return s.discardLocked(digest)
}

// shareImage replaces the image in work by a link to the same image of another
// template, so that both are one file to the page cache.
func (s *Store) shareImage(work string, img Digest) error {
	digests, err := s.digestsLocked()
	if err != nil {
		return err
	}
	name := img.Hex() + ".erofs"
	for _, d := range digests {
		switch err := s.root.Link(d.Hex()+"/"+name, work+"/linked"); {
		case err == nil:
			return s.root.Rename(work+"/linked", work+"/"+name)
		case !errors.Is(err, fs.ErrNotExist):
			return fmt.Errorf("share image %s: %w", img, err)
		}
	}
	return nil
}
