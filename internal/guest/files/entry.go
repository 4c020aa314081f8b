package files

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"bivy/internal/guest/accounts"
	"bivy/internal/guest/wire"
	pb "bivy/internal/guest/wire/gen/filesystem"
)

// metadataPrefix begins the names of the extended attributes that hold a file's
// metadata.
const metadataPrefix = "user.e2b."

// pathInfo describes a path. It is gathered with the user's rights; the names of
// the owners are looked up later with the agent's.
type pathInfo struct {
	path     string
	info     fs.FileInfo // of the path itself
	kind     pb.FileType // of the target
	mode     uint32      // of the target
	target   string
	metadata map[string]string
}

// statPath describes path, which must be clean and absolute.
func statPath(path string) (pathInfo, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return pathInfo{}, err
	}
	return describe(path, info), nil
}

// describe returns the pathInfo of path, given the result of Lstat.
func describe(path string, info fs.FileInfo) pathInfo {
	f := pathInfo{path: path, info: info, kind: typeOf(info), mode: uint32(info.Mode().Perm())}
	if info.Mode()&fs.ModeSymlink == 0 {
		if f.kind != pb.FileType_FILE_TYPE_UNSPECIFIED {
			f.metadata = readMetadata(path)
		}
		return f
	}
	f.kind = pb.FileType_FILE_TYPE_UNSPECIFIED
	if to, err := os.Stat(path); err == nil {
		f.kind, f.mode = typeOf(to), uint32(to.Mode().Perm())
	}
	var err error
	if f.target, err = filepath.EvalSymlinks(path); err != nil {
		// The target does not exist or is not accessible: show the link's text.
		f.target, _ = os.Readlink(path) // empty if the link was removed meanwhile
	}
	return f
}

func typeOf(info fs.FileInfo) pb.FileType {
	switch {
	case info.Mode().IsRegular():
		return pb.FileType_FILE_TYPE_FILE
	case info.IsDir():
		return pb.FileType_FILE_TYPE_DIRECTORY
	case info.Mode()&fs.ModeSymlink != 0:
		return pb.FileType_FILE_TYPE_SYMLINK
	}
	return pb.FileType_FILE_TYPE_UNSPECIFIED
}

// entries returns the messages for paths.
func entries(resolver *accounts.Resolver, all ...pathInfo) []*pb.EntryInfo {
	user, group := resolver.Names()
	out := make([]*pb.EntryInfo, 0, len(all))
	for _, f := range all {
		e := &pb.EntryInfo{
			Name:         wire.Escape(filepath.Base(f.path)),
			Type:         f.kind,
			Path:         wire.Escape(f.path),
			Size:         f.info.Size(),
			Mode:         f.mode,
			Permissions:  f.info.Mode().String(),
			ModifiedTime: timestamppb.New(f.info.ModTime()),
			Metadata:     f.metadata,
		}
		if st, ok := f.info.Sys().(*syscall.Stat_t); ok {
			e.Owner, e.Group = user(st.Uid), group(st.Gid)
		}
		if f.target != "" {
			target := wire.Escape(f.target)
			e.SymlinkTarget = &target
		}
		out = append(out, e)
	}
	return out
}

// Limits of a file's metadata in bytes, from the protocol.
const (
	maxMetadataKey = 246
	maxMetadata    = 4096
)

// readMetadata returns the metadata of a file, or nil when there is none or the
// file system has no extended attributes. Values that are not printable ASCII are
// omitted, because messages cannot hold them.
func readMetadata(path string) map[string]string {
	var list [16 << 10]byte
	n, err := unix.Llistxattr(path, list[:])
	if err != nil || n == 0 {
		return nil
	}
	var all map[string]string
	for name := range strings.SplitSeq(string(list[:n]), "\x00") {
		key, ok := strings.CutPrefix(name, metadataPrefix)
		if !ok || !printable(key) {
			continue
		}
		var value [maxMetadata]byte
		n, err := unix.Lgetxattr(path, name, value[:])
		if err != nil || !printable(string(value[:n])) {
			continue
		}
		if all == nil {
			all = map[string]string{}
		}
		all[key] = string(value[:n])
	}
	return all
}

// writeMetadata replaces the metadata of an open file by want.
func writeMetadata(f *os.File, want map[string]string) error {
	fd := int(f.Fd())
	var list [16 << 10]byte
	n, err := unix.Flistxattr(fd, list[:])
	if err != nil {
		if errors.Is(err, unix.ENOTSUP) && len(want) == 0 {
			return nil
		}
		return os.NewSyscallError("flistxattr", err)
	}
	for name := range strings.SplitSeq(string(list[:n]), "\x00") {
		key, ok := strings.CutPrefix(name, metadataPrefix)
		if _, keep := want[key]; !ok || keep {
			continue
		}
		if err := unix.Fremovexattr(fd, name); err != nil && !errors.Is(err, unix.ENODATA) {
			return os.NewSyscallError("fremovexattr", err)
		}
	}
	for key, value := range want {
		if err := unix.Fsetxattr(fd, metadataPrefix+key, []byte(value), 0); err != nil {
			return os.NewSyscallError("fsetxattr", err)
		}
	}
	return nil
}

// printable reports whether s is printable ASCII.
func printable(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}
