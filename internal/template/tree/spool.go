package tree

import (
	"bytes"
	"fmt"
	"io"
	"os"
)

// Spool stores the contents of streamed files in one temporary file, so that
// memory is limited and no name of an entry is used as a host path. The caller
// opens the file and removes it.
type Spool struct {
	file *os.File
	off  int64
	buf  []byte
}

// NewSpool returns a spool that appends to file.
func NewSpool(file *os.File) *Spool {
	return &Spool{file: file, buf: make([]byte, 256<<10)}
}

// Add copies exactly size bytes of r into the spool.
func (s *Spool) Add(r io.Reader, size int64) (Content, error) {
	if size == 0 {
		return nil, nil
	}
	c := &spooled{file: s.file, off: s.off, size: size}
	n, err := io.CopyBuffer(io.NewOffsetWriter(s.file, s.off), onlyReader{io.LimitReader(r, size)}, s.buf)
	s.off += n
	if err != nil {
		return nil, fmt.Errorf("spool: %w", err)
	}
	if n != size {
		return nil, fmt.Errorf("spool: %w after %d of %d bytes", io.ErrUnexpectedEOF, n, size)
	}
	return c, nil
}

// onlyReader hides WriteTo, so that io.CopyBuffer uses the spool's buffer.
type onlyReader struct{ io.Reader }

type spooled struct {
	file      *os.File
	off, size int64
}

func (c *spooled) Open() (io.ReadCloser, error) {
	return io.NopCloser(io.NewSectionReader(c.file, c.off, c.size)), nil
}

// Bytes is content held in memory.
type Bytes []byte

// Open implements Content.
func (b Bytes) Open() (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(b)), nil
}

// AddAll copies all of r, at most limit bytes, into the spool.
func (s *Spool) AddAll(r io.Reader, limit int64) (Content, int64, error) {
	c := &spooled{file: s.file, off: s.off}
	n, err := io.CopyBuffer(io.NewOffsetWriter(s.file, s.off), onlyReader{io.LimitReader(r, limit+1)}, s.buf)
	s.off += n
	c.size = n
	switch {
	case err != nil:
		return nil, 0, fmt.Errorf("spool: %w", err)
	case n > limit:
		return nil, 0, fmt.Errorf("spool: exceeds %d bytes", limit)
	case n == 0:
		return nil, 0, nil
	}
	return c, n, nil
}
