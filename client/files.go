package client

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strconv"
)

// FileOptions are the options of file operations.
type FileOptions struct {
	User string // whose rights and home directory apply; empty: the session's user
}

func (o FileOptions) query(path string) url.Values {
	q := url.Values{"path": {path}}
	if o.User != "" {
		q.Set("user", o.User)
	}
	return q
}

// FileInfoHeader is the header of the answer to GET …/files with the FileInfo of
// the file, in JSON.
const FileInfoHeader = "Bivy-File-Info"

// ReadFile opens a file of the session for reading. Read returns io.EOF only
// when the whole file was read. The caller closes it.
func (s *Session) ReadFile(ctx context.Context, path string, o FileOptions) (io.ReadCloser, FileInfo, error) {
	resp, err := s.c.send(ctx, call{method: "GET", path: s.path("/files"), query: o.query(path)})
	if err != nil {
		return nil, FileInfo{}, err
	}
	info, err := headerInfo(resp)
	if err != nil {
		resp.Body.Close()
		return nil, FileInfo{}, err
	}
	return resp.Body, info, nil
}

func headerInfo(resp *http.Response) (FileInfo, error) {
	var info FileInfo
	if err := json.Unmarshal([]byte(resp.Header.Get(FileInfoHeader)), &info); err != nil {
		return info, unexpected(resp.StatusCode, "no "+FileInfoHeader+" header")
	}
	return info, nil
}

// WriteFile writes what r returns to a file of the session, and creates the
// directories above it.
func (s *Session) WriteFile(ctx context.Context, path string, r io.Reader, o FileOptions) (FileInfo, error) {
	var info FileInfo
	resp, err := s.c.send(ctx, call{method: "PUT", path: s.path("/files"), query: o.query(path),
		body: io.NopCloser(r), typ: "application/octet-stream", accept: "application/json"})
	if err != nil {
		return info, err
	}
	return info, readJSON(resp, &info)
}

// Stat describes a file of the session.
func (s *Session) Stat(ctx context.Context, path string, o FileOptions) (FileInfo, error) {
	var info FileInfo
	return info, s.c.json(ctx, "GET", s.path("/stat"), o.query(path), nil, &info, "")
}

// ListDir lists the files below a directory, down to depth levels; 1 or less
// lists the directory itself.
func (s *Session) ListDir(ctx context.Context, path string, depth int, o FileOptions) ([]FileInfo, error) {
	q := o.query(path)
	if depth > 0 {
		q.Set("depth", strconv.Itoa(depth))
	}
	var p Page[FileInfo]
	return p.Items, s.c.json(ctx, "GET", s.path("/dir"), q, nil, &p, "")
}

// MakeDir creates a directory and the directories above it.
func (s *Session) MakeDir(ctx context.Context, path string, o FileOptions) (FileInfo, error) {
	var info FileInfo
	return info, s.c.json(ctx, "POST", s.path("/mkdir"), o.query(path), nil, &info, "")
}

// Move renames a file or a directory.
func (s *Session) Move(ctx context.Context, from, to string, o FileOptions) (FileInfo, error) {
	var info FileInfo
	q := o.query(from)
	q.Set("to", to)
	return info, s.c.json(ctx, "POST", s.path("/move"), q, nil, &info, "")
}

// Remove removes a file, or a directory with everything below it.
func (s *Session) Remove(ctx context.Context, path string, o FileOptions) error {
	return s.c.json(ctx, "DELETE", s.path("/files"), o.query(path), nil, nil, "")
}
