package fake

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"bivy/internal/guest/wire"
	pb "bivy/internal/guest/wire/gen/filesystem"
)

func (a *agent) serveRead(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Query().Get("path")
	f, err := os.Open(a.path(name))
	if err != nil {
		refuse(w, fileStatus(err), wire.ReasonPath, fmt.Sprintf("path '%s': %v", name, errors.Unwrap(err)))
		return
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || st.IsDir() {
		refuse(w, http.StatusBadRequest, wire.ReasonPath, fmt.Sprintf("path '%s' is not a file", name))
		return
	}
	http.ServeContent(w, r, "", st.ModTime(), f)
}

func (a *agent) serveWrite(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Query().Get("path")
	path := a.path(name)
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		refuse(w, http.StatusBadRequest, wire.ReasonPath, fmt.Sprintf("path '%s' is a directory", name))
		return
	}
	sum := sha256.New()
	n, err := store(path, io.TeeReader(r.Body, sum))
	if err != nil {
		refuse(w, fileStatus(err), wire.ReasonPath, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	// A client that is gone does not need the answer.
	_ = json.NewEncoder(w).Encode([]wire.WrittenFile{{
		Name: filepath.Base(path), Path: wire.Escape(a.inside(path)), Type: "file", Size: n, SHA256: hex.EncodeToString(sum.Sum(nil)),
	}})
}

func store(path string, r io.Reader) (int64, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return 0, err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(f, r)
	return n, errors.Join(err, f.Close())
}

func fileStatus(err error) int {
	if errors.Is(err, fs.ErrNotExist) {
		return http.StatusNotFound
	}
	return http.StatusBadRequest
}

// fileError gives a file system error the code that the protocol has for it.
func fileError(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return wire.NewError(connect.CodeNotFound, wire.ReasonPath, err)
	case errors.Is(err, fs.ErrExist):
		return wire.NewError(connect.CodeAlreadyExists, wire.ReasonPath, err)
	}
	return wire.NewError(connect.CodeInvalidArgument, wire.ReasonPath, err)
}

func (a *agent) entry(path string) (*pb.EntryInfo, error) {
	st, err := os.Lstat(path)
	if err != nil {
		return nil, fileError(err)
	}
	e := &pb.EntryInfo{
		Name: wire.Escape(st.Name()), Path: wire.Escape(a.inside(path)), Size: st.Size(), Mode: uint32(st.Mode().Perm()),
		Permissions: st.Mode().String(), ModifiedTime: timestamppb.New(st.ModTime()), Type: fileType(st.Mode()),
	}
	if st.Mode().Type() == fs.ModeSymlink {
		target, err := os.Readlink(path)
		if err != nil {
			return nil, fileError(err)
		}
		target = wire.Escape(target)
		e.SymlinkTarget = &target
		if to, err := os.Stat(path); err == nil {
			e.Type = fileType(to.Mode())
		}
	}
	return e, nil
}

func fileType(m fs.FileMode) pb.FileType {
	switch {
	case m.IsRegular():
		return pb.FileType_FILE_TYPE_FILE
	case m.IsDir():
		return pb.FileType_FILE_TYPE_DIRECTORY
	}
	return pb.FileType_FILE_TYPE_UNSPECIFIED
}

// Stat implements the filesystem service.
func (a *agent) Stat(_ context.Context, req *connect.Request[pb.StatRequest]) (*connect.Response[pb.StatResponse], error) {
	e, err := a.entry(a.path(wire.Unescape(req.Msg.GetPath())))
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.StatResponse{Entry: e}), nil
}

// MakeDir implements the filesystem service.
func (a *agent) MakeDir(_ context.Context, req *connect.Request[pb.MakeDirRequest]) (*connect.Response[pb.MakeDirResponse], error) {
	path := a.path(wire.Unescape(req.Msg.GetPath()))
	if _, err := os.Lstat(path); err == nil {
		return nil, fileError(fs.ErrExist)
	}
	if err := os.MkdirAll(path, 0o755); err != nil {
		return nil, fileError(err)
	}
	e, err := a.entry(path)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.MakeDirResponse{Entry: e}), nil
}

// Move implements the filesystem service.
func (a *agent) Move(_ context.Context, req *connect.Request[pb.MoveRequest]) (*connect.Response[pb.MoveResponse], error) {
	from, to := a.path(wire.Unescape(req.Msg.GetSource())), a.path(wire.Unescape(req.Msg.GetDestination()))
	if _, err := os.Lstat(from); err != nil {
		return nil, fileError(err)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return nil, fileError(err)
	}
	if err := os.Rename(from, to); err != nil {
		return nil, fileError(err)
	}
	e, err := a.entry(to)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.MoveResponse{Entry: e}), nil
}

// Remove implements the filesystem service.
func (a *agent) Remove(_ context.Context, req *connect.Request[pb.RemoveRequest]) (*connect.Response[pb.RemoveResponse], error) {
	path := a.path(wire.Unescape(req.Msg.GetPath()))
	if path == a.s.root() {
		return nil, fileError(errors.New("the root cannot be removed"))
	}
	if err := os.RemoveAll(path); err != nil {
		return nil, fileError(err)
	}
	return connect.NewResponse(&pb.RemoveResponse{}), nil
}

// ListDir implements the filesystem service.
func (a *agent) ListDir(_ context.Context, req *connect.Request[pb.ListDirRequest]) (*connect.Response[pb.ListDirResponse], error) {
	root := a.path(wire.Unescape(req.Msg.GetPath()))
	if st, err := os.Stat(root); err != nil {
		return nil, fileError(err)
	} else if !st.IsDir() {
		return nil, fileError(errors.New("not a directory"))
	}
	depth := max(int(req.Msg.GetDepth()), 1)
	res := &pb.ListDirResponse{}
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		info, err := a.entry(path)
		if err != nil {
			return err
		}
		res.Entries = append(res.Entries, info)
		if e.IsDir() && strings.Count(strings.TrimPrefix(path, root), "/") >= depth {
			return fs.SkipDir
		}
		return nil
	})
	if err != nil {
		return nil, fileError(err)
	}
	return connect.NewResponse(res), nil
}
