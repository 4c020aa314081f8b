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

// zstdWindow is the largest window a zstd stream may ask memory for; larger
// ones need "zstd --ultra --long", which no image builder uses.
const zstdWindow = 128 << 20

// unpack returns the uncompressed bytes of r, told by its first bytes and not
// by its name. The caller closes it, which does not close r.
func unpack(r io.Reader) (io.ReadCloser, error) {
	below := &watched{r: r}
	br := bufio.NewReaderSize(below, 128<<10)
	head, err := br.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	p := packed{r: br, below: below, close: func() {}}
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
		return nil, kind.Errorf(kind.Invalid, "packed with xz, which is not read").WithHint("unpack it, or pack it with gzip or zstd")
	default:
		err = nil // a file of less than six bytes
	}
	if err != nil {
		return nil, p.fault(err)
	}
	return p, nil
}

// watched remembers the failure of a reader.
type watched struct {
	r   io.Reader
	err error
}

func (w *watched) Read(b []byte) (int, error) {
	n, err := w.r.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		w.err = err
	}
	return n, err
}

// packed gives every fault of a packed stream the kind of a bad input, except
// those of the stream below it.
type packed struct {
	r     io.Reader
	below *watched
	close func()
}

func (p packed) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	return n, p.fault(err)
}

func (p packed) Close() error { p.close(); return nil }

func (p packed) fault(err error) error {
	switch {
	case err == nil || err == io.EOF: //nolint:errorlint // a wrapped EOF is a fault
		return err
	case p.below.err != nil:
		return p.below.err
	}
	return kind.Errorf(kind.Invalid, "broken compression: %w", err)
}

// bounded passes on r until it is over limit, which then is a LimitError about
// the field of tree.Limits called name.
type bounded struct {
	r     io.Reader
	left  int64
	limit tree.LimitError
}

func newBounded(r io.Reader, name string, limit int64, layer string) *bounded {
	return &bounded{r: r, left: limit, limit: tree.LimitError{Limit: name, Max: limit, Layer: layer}}
}

func (b *bounded) Read(p []byte) (int, error) {
	// One byte more than is allowed, to tell the end from too much.
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

// counted tells progress of every read, and stops when ctx ends.
type counted struct {
	ctx      context.Context
	r        io.Reader
	progress Progress
	done     int64
	total    int64
}

func (c *counted) Read(p []byte) (int, error) {
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
	return io.ReadAll(newBounded(r, "ConfigBytes", limit, layer))
}
