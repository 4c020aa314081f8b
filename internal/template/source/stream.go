package source

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"context"
	"errors"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

// zstdWindow is the largest window of a zstd stream in bytes. Larger ones result
// only from "zstd --ultra --long", which image builders do not use.
const zstdWindow = 128 << 20

// decompress returns the decompressed content of r. It detects the compression by
// the first bytes. Closing the result does not close r.
func decompress(r io.Reader) (io.ReadCloser, error) {
	below := &errorRecorder{r: r}
	br := bufio.NewReaderSize(below, 128<<10)
	head, err := br.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	p := decompressor{r: br, below: below, close: func() {}}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		p.r, err = gzip.NewReader(br) // it holds nothing to close
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		var z *zstd.Decoder
		z, err = zstd.NewReader(br, zstd.WithDecoderMaxMemory(zstdWindow), zstd.WithDecoderMaxWindow(zstdWindow), zstd.WithDecoderConcurrency(1))
		if err == nil {
			p.r, p.close = z, z.Close
		}
	case bytes.HasPrefix(head, []byte("BZh")):
		p.r, err = bzip2.NewReader(br), nil
	case bytes.HasPrefix(head, []byte{0xfd, '7', 'z', 'X', 'Z', 0}):
		return nil, kind.Errorf(kind.Invalid, "xz compression is not supported").WithHint("decompress it, or use gzip or zstd")
	default:
		err = nil // a file of less than six bytes
	}
	if err != nil {
		return nil, p.fault(err)
	}
	return p, nil
}

// errorRecorder stores the error of a reader.
type errorRecorder struct {
	r   io.Reader
	err error
}

func (w *errorRecorder) Read(b []byte) (int, error) {
	n, err := w.r.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		w.err = err
	}
	return n, err
}

// decompressor gives errors of the compressed data the kind Invalid, and returns
// errors of the underlying reader unchanged.
type decompressor struct {
	r     io.Reader
	below *errorRecorder
	close func()
}

func (p decompressor) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	return n, p.fault(err)
}

func (p decompressor) Close() error { p.close(); return nil }

func (p decompressor) fault(err error) error {
	switch {
	case err == nil || err == io.EOF: //nolint:errorlint // a wrapped EOF is a fault
		return err
	case p.below.err != nil:
		return p.below.err
	}
	return kind.Errorf(kind.Invalid, "broken compression: %w", err)
}

// limitedReader reads from r and fails with a LimitError beyond limit bytes. name is
// the field of tree.Limits.
type limitedReader struct {
	r     io.Reader
	left  int64
	limit tree.LimitError
}

func newLimitedReader(r io.Reader, name string, limit int64, layer string) *limitedReader {
	return &limitedReader{r: r, left: limit, limit: tree.LimitError{Limit: name, Max: limit, Layer: layer}}
}

func (b *limitedReader) Read(p []byte) (int, error) {
	// One byte more than allowed, to distinguish the end from too much data.
	if int64(len(p)) > b.left+1 {
		p = p[:b.left+1]
	}
	n, err := b.r.Read(p)
	if int64(n) > b.left {
		e := b.limit
		return int(b.left), kind.Wrap(kind.Exhausted, &e)
	}
	b.left -= int64(n)
	return n, err
}

// progressReader calls progress after every read, and fails when ctx ends.
type progressReader struct {
	ctx      context.Context
	r        io.Reader
	progress Progress
	done     int64
	total    int64
}

func (c *progressReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := c.r.Read(p)
	c.done += int64(n)
	if c.progress != nil {
		c.progress(c.done, c.total)
	}
	return n, err
}

// readAll reads all of r, at most limit bytes.
func readAll(r io.Reader, limit int64, layer string) ([]byte, error) {
	return io.ReadAll(newLimitedReader(r, "ConfigBytes", limit, layer))
}
