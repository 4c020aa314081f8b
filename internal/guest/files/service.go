package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"bivy/internal/guest/accounts"
	"bivy/internal/guest/proc"
	"bivy/internal/guest/wire"
	pb "bivy/internal/guest/wire/gen/filesystem"
)

// MaxEntries is how many entries one ListDir returns at most.
const MaxEntries = 1 << 16

// Service implements the filesystem service of package wire.
type Service struct {
	resolver *accounts.Resolver
	log      *slog.Logger
	watchers watchers
}

// NewService returns a service that resolves users and paths with resolver.
func NewService(resolver *accounts.Resolver, log *slog.Logger) *Service {
	s := &Service{resolver: resolver, log: log}
	s.watchers.polled = map[string]*poller{}
	return s
}

// resolve returns the user of a request and the absolute path that it names.
func (s *Service) resolve(req connect.AnyRequest, path string) (accounts.User, string, error) {
	u, err := proc.User(s.resolver, req.Header())
	if err != nil {
		return u, "", err
	}
	path, err = s.resolver.Path(u, path)
	if err != nil {
		return u, "", wire.NewError(connect.CodeInvalidArgument, wire.ReasonPath, err)
	}
	return u, path, nil
}

// pathError gives an error of the file system a Connect code. shown is the path
// for the message.
func pathError(shown string, err error) error {
	var ce *connect.Error
	if err == nil || errors.As(err, &ce) {
		return err
	}
	shown = wire.Escape(shown)
	code := connect.CodeInternal
	// The error without the path, which is in shown.
	cause := err
	var pe *fs.PathError
	var le *os.LinkError
	switch {
	case errors.As(err, &pe):
		cause = pe.Err
	case errors.As(err, &le):
		cause = le.Err
	}
	switch {
	case errors.Is(err, errTooMany):
		return wire.NewError(connect.CodeResourceExhausted, wire.ReasonLimit, fmt.Errorf("path '%s': %w", shown, err))
	case errors.Is(err, fs.ErrNotExist):
		return wire.NewError(connect.CodeNotFound, wire.ReasonPath, fmt.Errorf("path '%s' does not exist", shown))
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		code = connect.CodePermissionDenied
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EBUSY), errors.Is(err, unix.EXDEV), errors.Is(err, unix.ETXTBSY):
		code = connect.CodeFailedPrecondition
	case errors.Is(err, fs.ErrExist):
		code = connect.CodeAlreadyExists
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EISDIR), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.ENXIO):
		code = connect.CodeInvalidArgument
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return wire.NewError(connect.CodeResourceExhausted, wire.ReasonNoSpace, fmt.Errorf("path '%s': %w", shown, cause))
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM):
		code = connect.CodeResourceExhausted
	}
	return wire.NewError(code, wire.ReasonPath, fmt.Errorf("path '%s': %w", shown, cause))
}

// entry describes path with the rights of u.
func (s *Service) entry(u accounts.User, path string) (*pb.EntryInfo, error) {
	var f pathInfo
	err := u.Do(func() (err error) {
		f, err = statPath(path)
		return err
	})
	if err != nil {
		return nil, pathError(path, err)
	}
	return entries(s.resolver, f)[0], nil
}

// Stat implements the service.
func (s *Service) Stat(_ context.Context, req *connect.Request[pb.StatRequest]) (*connect.Response[pb.StatResponse], error) {
	u, path, err := s.resolve(req, req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	e, err := s.entry(u, path)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.StatResponse{Entry: e}), nil
}

// MakeDir implements the service.
func (s *Service) MakeDir(_ context.Context, req *connect.Request[pb.MakeDirRequest]) (*connect.Response[pb.MakeDirResponse], error) {
	u, path, err := s.resolve(req, req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	err = u.Do(func() error {
		switch st, err := os.Stat(path); {
		case err == nil && st.IsDir():
			return wire.NewError(connect.CodeAlreadyExists, wire.ReasonPath, fmt.Errorf("directory '%s' already exists", wire.Escape(path)))
		case err == nil:
			return wire.NewError(connect.CodeInvalidArgument, wire.ReasonPath, fmt.Errorf("path '%s' already exists and is not a directory", wire.Escape(path)))
		}
		return os.MkdirAll(path, 0o755)
	})
	if err != nil {
		return nil, pathError(path, err)
	}
	e, err := s.entry(u, path)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.MakeDirResponse{Entry: e}), nil
}

// Move implements the service. It renames, so both paths must be on one file
// system; other moves are refused as failed_precondition.
func (s *Service) Move(_ context.Context, req *connect.Request[pb.MoveRequest]) (*connect.Response[pb.MoveResponse], error) {
	u, from, err := s.resolve(req, req.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	to, err := s.resolver.Path(u, req.Msg.GetDestination())
	if err != nil {
		return nil, wire.NewError(connect.CodeInvalidArgument, wire.ReasonPath, err)
	}
	shown := from
	err = u.Do(func() error {
		// Before MkdirAll, so that a missing source creates no directories.
		if _, err := os.Lstat(from); err != nil {
			return err
		}
		shown = to
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		return os.Rename(from, to)
	})
	if err != nil {
		return nil, pathError(shown, err)
	}
	e, err := s.entry(u, to)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.MoveResponse{Entry: e}), nil
}

// Remove implements the service.
func (s *Service) Remove(_ context.Context, req *connect.Request[pb.RemoveRequest]) (*connect.Response[pb.RemoveResponse], error) {
	u, path, err := s.resolve(req, req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if err := u.Do(func() error { return os.RemoveAll(path) }); err != nil {
		return nil, pathError(path, err)
	}
	return connect.NewResponse(&pb.RemoveResponse{}), nil
}

// ListDir implements the service.
func (s *Service) ListDir(_ context.Context, req *connect.Request[pb.ListDirRequest]) (*connect.Response[pb.ListDirResponse], error) {
	u, path, err := s.resolve(req, req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	var all []pathInfo
	err = u.Do(func() error {
		all, err = list(nil, path, max(req.Msg.GetDepth(), 1))
		return err
	})
	if err != nil {
		return nil, pathError(path, err)
	}
	return connect.NewResponse(&pb.ListDirResponse{Entries: entries(s.resolver, all...)}), nil
}

var errTooMany = fmt.Errorf("more than %d entries: list a smaller directory or a lower depth", MaxEntries)

// list appends the entries below dir in lexical order, each directory before its
// content. Symbolic links are not followed, except dir itself.
func list(all []pathInfo, dir string, depth uint32) ([]pathInfo, error) {
	infos, err := readDir(dir, MaxEntries-len(all))
	if err != nil {
		return nil, err
	}
	for _, info := range infos {
		path := filepath.Join(dir, info.Name())
		all = append(all, describe(path, info))
		if !info.IsDir() || depth == 1 {
			continue
		}
		deeper, err := list(all, path, depth-1)
		switch {
		case errors.Is(err, errTooMany):
			return nil, err
		case err != nil:
			// Not readable by the user, or removed meanwhile: only the entry
			// itself is listed.
			continue
		}
		all = deeper
	}
	return all, nil
}

// readDir reads a directory of at most limit entries.
func readDir(dir string, limit int) ([]fs.FileInfo, error) {
	// O_DIRECTORY: opening a device or a FIFO could block.
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var infos []fs.FileInfo
	for {
		some, err := f.Readdir(1024)
		infos = append(infos, some...)
		if len(infos) > limit {
			return nil, errTooMany
		}
		if errors.Is(err, io.EOF) || (err == nil && len(some) == 0) {
			break
		}
		if err != nil {
			return nil, err
		}
	}
	slices.SortFunc(infos, func(a, b fs.FileInfo) int {
		switch {
		case a.Name() < b.Name():
			return -1
		case a.Name() > b.Name():
			return 1
		}
		return 0
	})
	return infos, nil
}
