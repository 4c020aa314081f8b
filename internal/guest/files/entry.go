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

// metadataPrefix is where a file's metadata is kept, as extended attributes.
const metadataPrefix = "user.e2b."

// found is what a path turned out to be. It is gathered with the user's
// rights; names of owners are put to it afterwards, with the agent's.
type found struct {
	path     string
	info     fs.FileInfo // of the path itself
	kind     pb.FileType // of the target
	mode     uint32      // of the target
	target   string
	metadata map[string]string
}

// look describes path, which must be clean and absolute.
func look(path string) (found, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return found{}, err
	}
	return inspect(path, info), nil
}

// inspect completes what is known about path from its Lstat.
func inspect(path string, info fs.FileInfo) found {
	f := found{path: path, info: info, kind: typeOf(info), mode: uint32(info.Mode().Perm())}
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
		// It leads nowhere the user can see: show what it says.
		f.target, _ = os.Readlink(path) // empty if it has just gone
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

// entries turns what was found into messages.
func entries(realm *accounts.Realm, all ...found) []*pb.EntryInfo {
	user, group := realm.Names()
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

// Bounds of a file's metadata; the protocol's own.
const (
	maxMetadataKey = 246
	maxMetadata    = 4096
)

// readMetadata returns the metadata of a file, nil when there is none or the
// file system has no attributes. Foreign values that are not printable are
// left out, as no message could carry them.
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

// writeMetadata makes want the whole metadata of an open file.
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

// printable reports that s is printable ASCII.
func printable(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}
