package files

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"bivy/internal/guest/accounts"
	"bivy/internal/guest/wire"
)

const (
	// MaxParts is how many files one upload may have.
	MaxParts = 1000
	// maxCompose bounds the body of a compose request.
	maxCompose = 1 << 20
)

// Write handles POST /files for the named user and returns what it stored.
func (s *Service) Write(r *http.Request, username string) ([]wire.WrittenFile, error) {
	u, err := s.account(username)
	if err != nil {
		return nil, err
	}
	metadata, err := metadataOf(r.Header)
	if err != nil {
		return nil, err
	}
	body := io.Reader(r.Body)
	switch encoding := strings.ToLower(r.Header.Get("Content-Encoding")); encoding {
	case "", "identity":
	case "gzip", "x-gzip":
		z, err := gzip.NewReader(body)
		if err != nil {
			return nil, badRequest("the body is not gzip: " + err.Error())
		}
		defer z.Close()
		body = z
	default:
		return nil, badRequest(fmt.Sprintf("Content-Encoding %q is not supported", encoding))
	}
	query := r.URL.Query()
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return nil, badRequest("Content-Type: " + err.Error())
	}
	up := upload{service: s, user: u, metadata: metadata}
	switch kind {
	case "application/octet-stream":
		if !query.Has("path") || query.Get("path") == "" {
			return nil, badRequest("path: missing")
		}
		err = up.storeOne(query.Get("path"), body)
	case "multipart/form-data":
		if params["boundary"] == "" {
			return nil, badRequest("Content-Type has no boundary")
		}
		err = up.multipart(multipart.NewReader(body, params["boundary"]), query.Get("path"))
	default:
		err = badRequest(fmt.Sprintf("Content-Type %q: want multipart/form-data or application/octet-stream", kind))
	}
	if err != nil {
		return nil, err
	}
	if len(up.written) == 0 {
		return nil, badRequest("the body has no part named file")
	}
	return up.written, nil
}

// upload is one request that writes files.
type upload struct {
	service  *Service
	user     accounts.User
	metadata map[string]string
	written  []wire.WrittenFile
}

func (up *upload) multipart(parts *multipart.Reader, fixed string) error {
	for count := 0; ; count++ {
		part, err := parts.NextRawPart()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return badRequest("the multipart body is malformed: " + err.Error())
		}
		if count == MaxParts {
			return badRequest(fmt.Sprintf("the multipart body has more than %d parts", MaxParts))
		}
		if part.FormName() != "file" {
			continue
		}
		path := fixed
		if path == "" {
			// The part's own method gives the base name only.
			_, params, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
			if err != nil || params["filename"] == "" {
				return badRequest("a part named file has no filename, and there is no path")
			}
			path = params["filename"]
		}
		if err := up.storeOne(path, part); err != nil {
			return err
		}
	}
}

// one stores one file.
func (up *upload) storeOne(path string, data io.Reader) error {
	full, err := up.service.resolver.Path(up.user, path)
	if err != nil {
		return badRequest(err.Error())
	}
	shown := wire.Escape(full)
	if slices.ContainsFunc(up.written, func(w wire.WrittenFile) bool { return w.Path == shown }) {
		return badRequest("path '" + shown + "' is given twice")
	}
	size, sum, err := store(up.user, full, up.metadata, data)
	if err != nil {
		return fileError(full, err)
	}
	up.written = append(up.written, wire.WrittenFile{
		Name: wire.Escape(filepath.Base(full)), Path: shown, Type: "file",
		Metadata: up.metadata, Size: size, SHA256: sum,
	})
	return nil
}

// store writes data to path and returns size and SHA-256. It writes in place, as
// programs of the user do, so that links, owner, permissions and watchers of an
// existing file are kept. When writing fails, a new file is removed; an existing
// one has lost its content, as with any program.
func store(u accounts.User, path string, metadata map[string]string, data io.Reader) (int64, string, error) {
	f, created, err := create(u, path)
	if err != nil {
		return 0, "", err
	}
	// The descriptor was opened with the user's rights, which the kernel does
	// not check again.
	sum := sha256.New()
	size, err := io.Copy(io.MultiWriter(f, sum), bodyReader{data})
	if err == nil {
		err = writeMetadata(f, metadata)
	}
	err = errors.Join(err, f.Close())
	if err != nil {
		if created {
			err = errors.Join(err, u.Do(func() error { return os.Remove(path) }))
		}
		return 0, "", err
	}
	return size, hex.EncodeToString(sum.Sum(nil)), nil
}

// create opens path for writing, creates its parents, and truncates it. It
// reports whether the file is new.
func create(u accounts.User, path string) (f *os.File, created bool, err error) {
	const flags = os.O_WRONLY | unix.O_NONBLOCK | unix.O_NOCTTY
	err = u.Do(func() error {
		f, err = os.OpenFile(path, flags|os.O_CREATE|os.O_EXCL, 0o666)
		if errors.Is(err, unix.ENOENT) {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				return err
			}
			f, err = os.OpenFile(path, flags|os.O_CREATE|os.O_EXCL, 0o666)
		}
		created = err == nil
		if errors.Is(err, unix.EEXIST) {
			f, err = os.OpenFile(path, flags|os.O_CREATE, 0o666)
		}
		return err
	})
	if err != nil {
		return nil, false, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = badRequest("path '" + wire.Escape(path) + "' is not a regular file")
	}
	if err == nil && !created {
		// The kernel clears setuid and setgid when a user writes to a file, but
		// not when root does, and the agent writes as root.
		if special := fs.ModeSetuid | fs.ModeSetgid; u.UID != 0 && info.Mode()&special != 0 {
			err = f.Chmod(info.Mode() &^ special)
		}
		err = errors.Join(err, f.Truncate(0))
	}
	if err != nil {
		return nil, false, errors.Join(err, f.Close())
	}
	return f, created, nil
}

// bodyReader turns errors of the request's body into HTTPErrors, so that they are
// not taken for errors of the file.
type bodyReader struct{ io.Reader }

func (b bodyReader) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	var refused *HTTPError
	if err != nil && !errors.Is(err, io.EOF) && !errors.As(err, &refused) {
		err = badRequest("the body ends early: " + err.Error())
	}
	return n, err
}

// metadataOf collects the X-Metadata headers of a request.
func metadataOf(h http.Header) (map[string]string, error) {
	var all map[string]string
	total := 0
	for name, values := range h {
		// net/http has put the names in canonical form.
		key, ok := strings.CutPrefix(name, wire.HeaderMetadata)
		if !ok {
			continue
		}
		key = strings.ToLower(key)
		value := strings.Join(values, ", ")
		total += len(key) + len(value)
		switch {
		case key == "" || len(key) > maxMetadataKey || !printable(key):
			return nil, badRequest(fmt.Sprintf("metadata key %.64q: want 1 to %d bytes of printable ASCII", key, maxMetadataKey))
		case !printable(value):
			return nil, badRequest(fmt.Sprintf("metadata value of %q: want printable ASCII", key))
		case total > maxMetadata:
			return nil, badRequest(fmt.Sprintf("metadata: more than %d bytes in all", maxMetadata))
		}
		if all == nil {
			all = map[string]string{}
		}
		all[key] = value
	}
	return all, nil
}

// Compose handles POST /files/compose: it concatenates the sources into the
// destination and removes them.
func (s *Service) Compose(r *http.Request) (wire.WrittenFile, error) {
	var none wire.WrittenFile
	var req wire.ComposeRequest
	if err := json.NewDecoder(io.LimitReader(r.Body, maxCompose)).Decode(&req); err != nil {
		return none, badRequest("the body is not a compose request: " + err.Error())
	}
	u, err := s.account(req.Username)
	if err != nil {
		return none, err
	}
	if len(req.SourcePaths) == 0 || len(req.SourcePaths) > MaxParts || req.Destination == "" {
		return none, badRequest(fmt.Sprintf("want 1 to %d source_paths and a destination", MaxParts))
	}
	to, err := s.resolver.Path(u, req.Destination)
	if err != nil {
		return none, badRequest("destination: " + err.Error())
	}
	var sources []string
	for _, path := range req.SourcePaths {
		from, err := s.resolver.Path(u, path)
		if err != nil {
			return none, badRequest("source_paths: " + err.Error())
		}
		if from == to || slices.Contains(sources, from) {
			return none, badRequest("source_paths: '" + wire.Escape(from) + "' is given twice")
		}
		sources = append(sources, from)
	}
	// Check the sources before the destination is truncated.
	for _, path := range sources {
		f, _, err := openRegular(u, path)
		if err != nil {
			return none, fileError(path, err)
		}
		_ = f.Close() // was not used
	}
	joined := &concatReader{user: u, paths: sources}
	defer joined.close()
	size, sum, err := store(u, to, nil, joined)
	if err != nil {
		return none, fileError(to, err)
	}
	for _, path := range sources {
		if err := u.Do(func() error { return os.Remove(path) }); err != nil {
			return none, fileError(path, err)
		}
	}
	return wire.WrittenFile{Name: wire.Escape(filepath.Base(to)), Path: wire.Escape(to), Type: "file", Size: size, SHA256: sum}, nil
}

// concatReader reads files one after the other, of which one is open at a time.
type concatReader struct {
	user  accounts.User
	paths []string
	open  *os.File
}

func (j *concatReader) Read(p []byte) (int, error) {
	for {
		if j.open == nil {
			if len(j.paths) == 0 {
				return 0, io.EOF
			}
			f, _, err := openRegular(j.user, j.paths[0])
			if err != nil {
				return 0, fileError(j.paths[0], err)
			}
			j.open, j.paths = f, j.paths[1:]
		}
		n, err := j.open.Read(p)
		if n > 0 || (err != nil && !errors.Is(err, io.EOF)) {
			return n, err
		}
		j.close()
	}
}

func (j *concatReader) close() {
	if j.open != nil {
		_ = j.open.Close() // was only read
		j.open = nil
	}
}
