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

// formatVersion is part of every build key. It is increased when the same input
// would result in another image.
const formatVersion = 1

// Build returns the template that spec describes and gives it the spec's name.
// Content that was built before is not built again, and concurrent calls for the
// same content share one build, which stops when the last of them is cancelled. A
// failed build leaves nothing behind. progress may be nil.
//
// Without a name the template is kept for the grace period. A caller that uses it
// longer must take a lease within that time.
func (s *Store) Build(ctx context.Context, spec Spec, progress Progress) (Template, error) {
	t, err := s.buildDigest(ctx, spec, progress)
	if err != nil {
		label := spec.Name
		if label == "" {
			label = "from " + spec.From.Kind()
		}
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			return Template{}, kind.Errorf(kind.Exhausted, "template %s: %w", label, err).WithHint("free space below %s, e.g. by removing unused templates", s.dir)
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
	go func() { // every caller waits for it; the last one to leave cancels it
		defer cancel()
		t, err := s.build(work, spec, src, f.report)
		if err == nil && cached {
			err = s.writeFile(buildsDir+"/"+key, []byte(string(t.Digest)+"\n"))
		}
		s.finish(key, f, t, errors.Join(err, src.Close()))
	}()
	return s.wait(ctx, f, id)
}

// built returns the template of an earlier build with the same key.
func (s *Store) built(key string) (Template, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	digest, err := s.readDigest(buildsDir + "/" + key)
	if errors.Is(err, fs.ErrNotExist) {
		return Template{}, kind.Errorf(kind.NotFound, "build %s does not exist", key)
	}
	if err != nil {
		return Template{}, fmt.Errorf("build %s: %w", key, err)
	}
	t, err := s.load(digest)
	if err != nil {
		if !kind.Is(err, kind.NotFound) {
			s.opts.Log.Warn("building a broken template again", "template", digest, "error", err)
		}
		return Template{}, kind.Errorf(kind.NotFound, "build %s: %w", key, err)
	}
	return t, s.touch(digest)
}

// touch restarts the grace period of a template that a build returns.
func (s *Store) touch(digest Digest) error {
	now := s.opts.Now()
	return s.root.Chtimes(digest.Hex()+"/"+leasesDir, now, now)
}

// key returns a hash of everything that determines the result of a build; the name
// does not. Without a source key it hashes the spec: such a key is only used to
// join a running build.
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

// templateDigest returns the digest of a template.
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

// build runs one build in a new directory below tmp.
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
	// Unlinked at once, so that its space is freed when the process ends.
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
	if err := t.BeginLayer("files added by bivy"); err != nil {
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

// merge combines the defaults of the source with the spec, which takes precedence.
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

// addSkeleton adds the directories that a sandbox needs as mount points and the
// files that name resolution needs, where the source does not have them: other
// runtimes create them at start.
//
// /tmp must not be empty: on an empty one gVisor mounts a tmpfs, which the
// session's disk limit and its list of changed files do not cover. Debian has the
// directory .X11-unix there.
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

// addExtra adds an extra file to the image, and makes its parent directories
// writable by root only.
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

// install moves a finished build into place, unless the same template exists.
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

// replaceLocked removes a broken template, so that a new build can take its place,
// unless something may still run from it.
func (s *Store) replaceLocked(digest Digest, broken error) error {
	leases, err := s.leasesLocked(digest)
	if err != nil {
		return err
	}
	if len(leases) > 0 {
		return kind.Errorf(kind.Conflict, "%w; it is in use by %s", broken, strings.Join(leases, ", "))
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
