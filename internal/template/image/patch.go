package image

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"bivy/internal/template/tree"
)

// The parts of the EROFS format that patch reads and writes, from the
// kernel's Documentation/filesystems/erofs.rst and fs/erofs/erofs_fs.h.
const (
	superOffset = 1024
	superMagic  = 0xe0f5e1e2
	superSize   = 128

	inodeSlot     = 32 // bytes; an inode number counts slots
	inodeExtended = 1  // bit 0 of the format: 64 bytes instead of 32

	layoutPlain  = 0
	layoutInline = 2

	direntSize = 12
)

// patcher corrects in the image what sourceFS could not express, and checks that the
// image has nothing that gVisor does not support.
type patcher struct {
	file    *os.File
	size    int64
	plan    *sourceFS
	meta    int64                  // where inode numbers count from
	numbers map[*tree.Inode]uint64 // inode numbers of files with several names
	pending []alias
}

type alias struct {
	at  int64 // where the directory entry keeps its inode number
	ino *tree.Inode
}

func patch(f *os.File, p *sourceFS) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	s := &patcher{file: f, size: fi.Size(), plan: p, numbers: map[*tree.Inode]uint64{}}
	if s.size%BlockSize != 0 {
		return fmt.Errorf("size of %d bytes is not a multiple of the block size", s.size)
	}
	sb, err := s.read(superOffset, superSize)
	if err != nil {
		return err
	}
	le := binary.LittleEndian
	checksum, compat, incompat := le.Uint32(sb[4:]), le.Uint32(sb[8:]), le.Uint32(sb[80:])
	if le.Uint32(sb) != superMagic || sb[12] != 12 || incompat != 0 || compat != 0 || checksum != 0 {
		return fmt.Errorf("superblock: magic %#x, block bits %d, features %#x and %#x, checksum %#x are not supported by gVisor",
			le.Uint32(sb), sb[12], compat, incompat, checksum)
	}
	s.meta = int64(le.Uint32(sb[40:])) * BlockSize
	if err := s.directory("", uint64(le.Uint16(sb[14:])), p.tree.Root()); err != nil {
		return err
	}
	for _, a := range s.pending {
		number, ok := s.numbers[a.ino]
		if !ok {
			return fmt.Errorf("the first name of a hard-linked file is missing")
		}
		if _, err := s.file.WriteAt(le.AppendUint64(nil, number), a.at); err != nil {
			return err
		}
	}
	return nil
}

func (s *patcher) read(off, n int64) ([]byte, error) {
	if off < 0 || n < 0 || off+n > s.size {
		return nil, fmt.Errorf("%d bytes at %d are outside the image", n, off)
	}
	b := make([]byte, n)
	if _, err := s.file.ReadAt(b, off); err != nil && err != io.EOF {
		return nil, err
	}
	return b, nil
}

// inode holds the fields of an inode that patch needs.
type inode struct {
	at     int64 // where it is
	end    int64 // where inline data would begin
	mode   uint32
	layout int
	size   int64
	block  int64
}

func (s *patcher) inode(number uint64) (inode, error) {
	at := s.meta + int64(number)*inodeSlot
	b, err := s.read(at, inodeSlot)
	if err != nil {
		return inode{}, err
	}
	le := binary.LittleEndian
	format := le.Uint16(b)
	if n := le.Uint16(b[2:]); n != 0 {
		return inode{}, fmt.Errorf("inode %d has extended attributes", number)
	}
	i := inode{at: at, mode: uint32(le.Uint16(b[4:])), layout: int(format>>1) & 7, block: int64(le.Uint32(b[16:])) * BlockSize}
	if format&inodeExtended == 0 {
		i.size, i.end = int64(le.Uint32(b[8:])), at+32
	} else {
		i.size, i.end = int64(le.Uint64(b[8:])), at+64
	}
	return i, nil
}

// directory patches everything below the directory with the given inode number.
func (s *patcher) directory(name string, number uint64, dir *tree.Inode) error {
	i, err := s.inode(number)
	if err != nil {
		return err
	}
	data := i.block
	switch i.layout {
	case layoutPlain:
	case layoutInline:
		data = i.end
	default:
		return fmt.Errorf("%s/: directory layout %d", name, i.layout)
	}
	seen := 0
	for off := int64(0); off < i.size; off += BlockSize {
		n, err := s.block(name, data+off, min(BlockSize, i.size-off), dir)
		if err != nil {
			return err
		}
		seen += n
	}
	if want := len(dir.Names()); seen != want {
		return fmt.Errorf("%s/: %d entries, want %d", name, seen, want)
	}
	return nil
}

// block patches the entries of one block of a directory and counts them.
func (s *patcher) block(dirName string, at, size int64, dir *tree.Inode) (int, error) {
	b, err := s.read(at, size)
	if err != nil {
		return 0, err
	}
	le := binary.LittleEndian
	if size < direntSize {
		return 0, fmt.Errorf("%s/: a directory block of %d bytes", dirName, size)
	}
	count := int(le.Uint16(b[8:])) / direntSize
	if count == 0 || count*direntSize > len(b) {
		return 0, fmt.Errorf("%s/: a directory block of %d entries", dirName, count)
	}
	seen := 0
	for n := range count {
		e := b[n*direntSize:]
		from, to := int(le.Uint16(e[8:])), len(b)
		if n+1 < count {
			to = int(le.Uint16(e[direntSize+8:]))
		}
		if from > to || to > len(b) {
			return 0, fmt.Errorf("%s/: a name from %d to %d", dirName, from, to)
		}
		base := strings.TrimRight(string(b[from:to]), "\x00")
		if base == "." || base == ".." {
			continue
		}
		ino := dir.Child(base)
		if ino == nil {
			return 0, fmt.Errorf("%s/%s: unexpected entry", dirName, base)
		}
		if err := s.entry(dirName+"/"+base, le.Uint64(e), at+int64(n*direntSize), ino); err != nil {
			return 0, err
		}
		seen++
	}
	return seen, nil
}

func (s *patcher) entry(name string, number uint64, direntAt int64, ino *tree.Inode) error {
	if s.plan.alias(name, ino) {
		s.pending = append(s.pending, alias{direntAt, ino})
		// The entry must have the type of the file, not of the empty file.
		if ino.IsSymlink() {
			if _, err := s.file.WriteAt([]byte{fileTypeSymlink}, direntAt+10); err != nil {
				return err
			}
		}
		return nil
	}
	if !ino.IsDir() && ino.Links() > 1 {
		s.numbers[ino] = number
	}
	i, err := s.inode(number)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if i.mode != ino.Mode&0xffff {
		return fmt.Errorf("%s: mode %#o, want %#o", name, i.mode, ino.Mode)
	}
	switch ino.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return s.directory(name, number, ino)
	case unix.S_IFREG:
		return s.regular(name, i, ino)
	}
	return nil
}

const fileTypeSymlink = 7

// regular writes the real size of a short file into its inode.
func (s *patcher) regular(name string, i inode, ino *tree.Inode) error {
	if i.layout != layoutPlain {
		return fmt.Errorf("%s: file layout %d cannot be mapped", name, i.layout)
	}
	if ino.Size >= BlockSize || ino.Size == 0 {
		if i.size != ino.Size {
			return fmt.Errorf("%s: %d bytes, want %d", name, i.size, ino.Size)
		}
		return nil
	}
	if i.size != BlockSize {
		return fmt.Errorf("%s: %d bytes, want one block", name, i.size)
	}
	_, err := s.file.WriteAt(binary.LittleEndian.AppendUint32(nil, uint32(ino.Size)), i.at+8)
	return err
}
