package client

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// StreamType is the media type of a command's binary stream, in both
// directions. It is a sequence of frames: one byte for the type, four bytes for
// the length of the payload (big-endian), and the payload.
const StreamType = "application/vnd.bivy.stream"

// NDJSONType is the media type of streams of JSON lines.
const NDJSONType = "application/x-ndjson"

// FrameType is the type of a frame.
type FrameType byte

// Frames from the server.
const (
	FrameStart  FrameType = 1 // JSON Started
	FrameStdout FrameType = 2 // standard output, raw
	FrameStderr FrameType = 3 // standard error, raw
	FramePTY    FrameType = 4 // output of the terminal, raw
	FrameEnd    FrameType = 5 // JSON Exit; the last frame
	FrameError  FrameType = 6 // JSON Error; the last frame; the command may still run
	FramePing   FrameType = 7 // empty; sent when there was no other frame for a while
)

// Frames from the client.
const (
	FrameCommand    FrameType = 16 // JSON Command; the first frame
	FrameStdin      FrameType = 17 // standard input, raw
	FrameCloseStdin FrameType = 18 // empty
	FrameResize     FrameType = 19 // JSON Size
	FrameSignal     FrameType = 20 // JSON SendSignal
)

// MaxFrame bounds a frame's payload.
const MaxFrame = 1 << 20

const frameHeader = 5

// ErrFrame is wrapped by the error of FrameReader.Next for bytes that are not a
// frame.
var ErrFrame = errors.New("malformed frame")

// AppendFrame appends a frame's header and payload to b.
func AppendFrame(b []byte, t FrameType, payload []byte) []byte {
	b = append(b, byte(t))
	b = binary.BigEndian.AppendUint32(b, uint32(len(payload)))
	return append(b, payload...)
}

// AppendFrameJSON appends a frame whose payload is v in JSON.
func AppendFrameJSON(b []byte, t FrameType, v any) ([]byte, error) {
	payload, err := json.Marshal(v)
	if err != nil {
		return b, err
	}
	return AppendFrame(b, t, payload), nil
}

// FrameReader reads frames. It uses at most MaxFrame bytes of memory, and only
// as much as has arrived, even if a header announces more.
type FrameReader struct {
	r      io.Reader
	header [frameHeader]byte
	buf    []byte
}

// NewFrameReader returns a reader of frames from r, which should be buffered.
func NewFrameReader(r io.Reader) *FrameReader { return &FrameReader{r: r} }

// Next returns the next frame; its payload is valid until the next call. The
// error is io.EOF between frames and io.ErrUnexpectedEOF inside one. For a frame
// that is longer than MaxFrame it wraps ErrFrame, and nothing can be read after
// it. A FrameCommand that is too long is returned with its first MaxFrame bytes,
// so that the server can say which field is too large.
func (f *FrameReader) Next() (FrameType, []byte, error) {
	if _, err := io.ReadFull(f.r, f.header[:]); err != nil {
		return 0, nil, err
	}
	t := FrameType(f.header[0])
	announced := int64(binary.BigEndian.Uint32(f.header[1:]))
	if announced > MaxFrame && t != FrameCommand {
		return t, nil, tooLong(t, announced)
	}
	n := min(announced, MaxFrame)
	const step = 64 << 10
	f.buf = f.buf[:0]
	for int64(len(f.buf)) < n {
		want := int(min(n-int64(len(f.buf)), step))
		have := len(f.buf)
		if cap(f.buf)-have < want {
			grown := make([]byte, have, max(2*have, have+want, 4096))
			copy(grown, f.buf)
			f.buf = grown
		}
		f.buf = f.buf[:have+want]
		if got, err := io.ReadFull(f.r, f.buf[have:]); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return t, f.buf[:have+got], err
		}
	}
	if announced > MaxFrame {
		return t, f.buf, tooLong(t, announced)
	}
	return t, f.buf, nil
}

func tooLong(t FrameType, announced int64) error {
	return fmt.Errorf("%w: type %d announces %d bytes, at most %d", ErrFrame, t, announced, MaxFrame)
}
