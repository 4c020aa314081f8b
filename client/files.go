package client

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strconv"
)

// FileOptions are beside the path of a file; zero fields mean the session's
// own.
type FileOptions struct {
	User string
}

func (o FileOptions) query(path string) url.Values {
	q := url.Values{"path": {path}}
	if o.User != "" {
		q.Set("user", o.User)
	}
	return q
}

// FileInfoHeader is the header of GET …/files that holds the file's FileInfo
// in JSON.
const FileInfoHeader = "Bivy-File-Info"

// ReadFile opens a file of the session. Reading ends with an error, not with
// io.EOF, when the file could not be read whole. The caller closes it.
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

// WriteFile writes a file of the session from r, and the directories above it.
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

// ListDir lists what is in a directory, depth levels down; 1 is the directory
// itself.
func (s *Session) ListDir(ctx context.Context, path string, depth int, o FileOptions) ([]FileInfo, error) {
	q := o.query(path)
	if depth > 0 {
		q.Set("depth", strconv.Itoa(depth))
	}
	var p Page[FileInfo]
	return p.Items, s.c.json(ctx, "GET", s.path("/dir"), q, nil, &p, "")
}

// MakeDir makes a directory and those above it.
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

// Remove removes a file, or a directory with all that is in it.
func (s *Session) Remove(ctx context.Context, path string, o FileOptions) error {
	return s.c.json(ctx, "DELETE", s.path("/files"), o.query(path), nil, nil, "")
}
