package guestclient

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"connectrpc.com/connect"

	"bivy/internal/guest/wire"
	pb "bivy/internal/guest/wire/gen/filesystem"
	"bivy/internal/kind"
)

// FileType is the type of a file. For a symbolic link it is that of the target, or
// Unknown when the target does not exist.
type FileType uint8

// The file types of the protocol; everything else is Unknown.
const (
	Unknown FileType = iota
	Regular
	Directory
)

// Entry describes a path. Names are bytes, not necessarily UTF-8.
type Entry struct {
	Name        string
	Path        string
	Type        FileType
	Size        int64
	Mode        fs.FileMode // permission bits
	Permissions string      // of the path itself, as "-rw-r--r--" or "Lrwxrwxrwx"
	Owner       string
	Group       string
	Modified    time.Time
	Target      string // of a symbolic link, resolved; otherwise empty
	Metadata    map[string]string
}

// Stat describes path, with the rights of user.
func (c *Client) Stat(ctx context.Context, user, path string) (Entry, error) {
	ctx, cancel := c.callContext(ctx)
	defer cancel()
	res, err := c.files.Stat(ctx, requestAs(user, &pb.StatRequest{Path: wire.Escape(path)}))
	if err != nil {
		return Entry{}, mapError(fmt.Sprintf("stat %q", path), err)
	}
	return entry(res.Msg.GetEntry()), nil
}

// ListDir lists path to the given depth (at least 1), in lexical order.
func (c *Client) ListDir(ctx context.Context, user, path string, depth int) ([]Entry, error) {
	ctx, cancel := c.callContext(ctx)
	defer cancel()
	res, err := c.files.ListDir(ctx, requestAs(user, &pb.ListDirRequest{Path: wire.Escape(path), Depth: uint32(max(depth, 1))})) //nolint:gosec // bounded below; a huge depth is the agent's to refuse
	if err != nil {
		return nil, mapError(fmt.Sprintf("list %q", path), err)
	}
	all := make([]Entry, 0, len(res.Msg.GetEntries()))
	for _, e := range res.Msg.GetEntries() {
		all = append(all, entry(e))
	}
	return all, nil
}

// MakeDir makes a directory and its parents. One that exists is kind Conflict.
func (c *Client) MakeDir(ctx context.Context, user, path string) (Entry, error) {
	ctx, cancel := c.callContext(ctx)
	defer cancel()
	res, err := c.files.MakeDir(ctx, requestAs(user, &pb.MakeDirRequest{Path: wire.Escape(path)}))
	if err != nil {
		return Entry{}, mapError(fmt.Sprintf("make directory %q", path), err)
	}
	return entry(res.Msg.GetEntry()), nil
}

// Move renames source to destination and makes the destination's parents.
func (c *Client) Move(ctx context.Context, user, source, destination string) (Entry, error) {
	ctx, cancel := c.callContext(ctx)
	defer cancel()
	res, err := c.files.Move(ctx, requestAs(user, &pb.MoveRequest{Source: wire.Escape(source), Destination: wire.Escape(destination)}))
	if err != nil {
		return Entry{}, mapError(fmt.Sprintf("move %q", source), err)
	}
	return entry(res.Msg.GetEntry()), nil
}

// Remove removes path and everything below it. A missing path is no error.
func (c *Client) Remove(ctx context.Context, user, path string) error {
	ctx, cancel := c.callContext(ctx)
	defer cancel()
	_, err := c.files.Remove(ctx, requestAs(user, &pb.RemoveRequest{Path: wire.Escape(path)}))
	return mapError(fmt.Sprintf("remove %q", path), err)
}

// File is a file being read. Size is -1 when the guest does not know it (the
// files of /proc). It must be closed.
type File struct {
	io.ReadCloser
	Size     int64
	Modified time.Time
}

// ReadFile opens path for reading as user. Reading fails when ctx ends.
func (c *Client) ReadFile(ctx context.Context, user, path string) (*File, error) {
	what := fmt.Sprintf("read %q", path)
	ctx, cancel := c.streamContext(ctx)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fileURL(user, path), nil)
	if err != nil {
		cancel()
		return nil, kind.Wrap(kind.Invalid, fmt.Errorf("%s: %w", what, err))
	}
	req.Header.Set("Accept-Encoding", "identity")
	res, err := c.do(what, req, http.StatusOK) //nolint:bodyclose // closed by the File
	if err != nil {
		cancel()
		return nil, err
	}
	modified, _ := http.ParseTime(res.Header.Get("Last-Modified")) // zero when the agent gives none
	return &File{ReadCloser: &body{res.Body, cancel}, Size: res.ContentLength, Modified: modified}, nil
}

type body struct {
	io.ReadCloser
	cancel context.CancelFunc
}

func (b *body) Close() error {
	b.cancel()
	return b.ReadCloser.Close()
}

// WriteFile writes data to path as user, creates missing parent directories, and
// returns path, size and digest of what the guest stored. size may be -1 when it
// is unknown.
func (c *Client) WriteFile(ctx context.Context, user, path string, data io.Reader, size int64) (wire.WrittenFile, error) {
	what := fmt.Sprintf("write %q", path)
	ctx, cancel := c.streamContext(ctx)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, fileURL(user, path), data)
	if err != nil {
		return wire.WrittenFile{}, kind.Wrap(kind.Invalid, fmt.Errorf("%s: %w", what, err))
	}
	req.Header.Set("Content-Type", "application/octet-stream")
	if size >= 0 {
		req.ContentLength = size
		if size == 0 {
			req.Body = http.NoBody
		}
	}
	var written []wire.WrittenFile
	if err := c.doJSON(what, req, &written); err != nil {
		return wire.WrittenFile{}, err
	}
	if len(written) != 1 {
		return wire.WrittenFile{}, kind.Errorf(kind.Internal, "%s: the guest reported %d files", what, len(written))
	}
	written[0].Name, written[0].Path = wire.Unescape(written[0].Name), wire.Unescape(written[0].Path)
	return written[0], nil
}

// Health returns nil when the agent responds.
func (c *Client) Health(ctx context.Context) error {
	ctx, cancel := c.callContext(ctx)
	defer cancel()
	return c.doEmpty(ctx, "health", http.MethodGet, "/health")
}

// InitResult is what the agent reports about its initialisation.
type InitResult struct {
	Version     string        // of the protocol
	Generation  uint64        // 1 for the first initialisation
	ClockOffset time.Duration // host's clock minus guest's, before the call
	ClockSet    bool          // whether the guest's clock was set
}

// Init initialises the agent, for the first time or after a restore; the client
// then uses the new token. It may be repeated: when the agent already has the new
// token, because a response was lost, Init tries again with that one.
func (c *Client) Init(ctx context.Context, init wire.InitRequest) (InitResult, error) {
	ctx, cancel := c.callContext(ctx)
	defer cancel()
	text, err := json.Marshal(init)
	if err != nil {
		return InitResult{}, fmt.Errorf("init: %w", err)
	}
	res, err := c.init(ctx, text, c.Token())
	if kind.Is(err, kind.Unauthentic) && init.AccessToken != "" && init.AccessToken != c.Token() {
		res, err = c.init(ctx, text, init.AccessToken)
	}
	if err != nil {
		return InitResult{}, err
	}
	c.setToken(init.AccessToken)
	return res, nil
}

func (c *Client) init(ctx context.Context, text []byte, token string) (InitResult, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/init", bytes.NewReader(text))
	if err != nil {
		return InitResult{}, fmt.Errorf("init: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	if token != "" {
		req.Header.Set(wire.HeaderToken, token)
	}
	res, err := c.do("init", req, http.StatusNoContent)
	if err != nil {
		return InitResult{}, err
	}
	h := res.Header
	generation, err1 := strconv.ParseUint(h.Get(wire.HeaderGeneration), 10, 64)
	offset, err2 := strconv.ParseInt(h.Get(wire.HeaderClockOffset), 10, 64)
	if err := errors.Join(err1, err2, res.Body.Close()); err != nil {
		return InitResult{}, kind.Wrap(kind.Internal, fmt.Errorf("init: response of the guest: %w", err))
	}
	return InitResult{
		Version:     h.Get(wire.HeaderVersion),
		Generation:  generation,
		ClockOffset: time.Duration(offset) * time.Millisecond,
		ClockSet:    h.Get(wire.HeaderClockSet) == "true",
	}, nil
}

// do sends req and returns the response if it has the wanted status.
func (c *Client) do(what string, req *http.Request, want int) (*http.Response, error) {
	res, err := c.http.Do(req)
	if err != nil {
		return nil, transportError(what, err)
	}
	if res.StatusCode == want {
		return res, nil
	}
	text, err := io.ReadAll(io.LimitReader(res.Body, 64<<10))
	err = errors.Join(err, res.Body.Close())
	var b wire.ErrorBody
	if jsonErr := json.Unmarshal(text, &b); jsonErr != nil || b.Message == "" {
		b.Message = "unexpected response " + res.Status
	}
	r := &agentError{what: what, text: b.Message, reason: wire.Reason(res.Header.Get(wire.HeaderReason)), cause: err}
	return nil, kind.Wrap(kindOfStatus(res.StatusCode), r)
}

func (c *Client) doJSON(what string, req *http.Request, into any) error {
	res, err := c.do(what, req, http.StatusOK)
	if err != nil {
		return err
	}
	err = json.NewDecoder(io.LimitReader(res.Body, maxResponse)).Decode(into)
	if err = errors.Join(err, res.Body.Close()); err != nil {
		return kind.Wrap(kind.Unavailable, fmt.Errorf("%s: response of the guest: %w", what, err))
	}
	return nil
}

func (c *Client) doEmpty(ctx context.Context, what, method, path string) error {
	req, err := http.NewRequestWithContext(ctx, method, base+path, nil)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	res, err := c.do(what, req, http.StatusNoContent)
	if err != nil {
		return err
	}
	return res.Body.Close()
}

func fileURL(user, path string) string {
	q := url.Values{"path": {path}}
	if user != "" {
		q.Set("username", user)
	}
	return base + "/files?" + q.Encode()
}

func requestAs[T any](user string, msg *T) *connect.Request[T] {
	req := connect.NewRequest(msg)
	setUser(req.Header(), user)
	return req
}

func entry(e *pb.EntryInfo) Entry {
	out := Entry{
		Name: wire.Unescape(e.GetName()), Path: wire.Unescape(e.GetPath()), Size: e.GetSize(),
		Mode: fs.FileMode(e.GetMode()) & fs.ModePerm, Permissions: e.GetPermissions(),
		Owner: e.GetOwner(), Group: e.GetGroup(), Target: wire.Unescape(e.GetSymlinkTarget()), Metadata: e.GetMetadata(),
	}
	if t := e.GetModifiedTime(); t != nil {
		out.Modified = t.AsTime()
	}
	switch e.GetType() {
	case pb.FileType_FILE_TYPE_FILE:
		out.Type = Regular
	case pb.FileType_FILE_TYPE_DIRECTORY:
		out.Type = Directory
	case pb.FileType_FILE_TYPE_UNSPECIFIED, pb.FileType_FILE_TYPE_SYMLINK:
	}
	return out
}
