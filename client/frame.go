package client

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// StreamType is the media type of a command's binary stream, in both
// directions: frames of one type byte, four bytes of big-endian payload
// length, and the payload.
const StreamType = "application/vnd.bivy.stream"

// NDJSONType is the media type of streams of JSON lines.
const NDJSONType = "application/x-ndjson"

// FrameType says what a frame's payload is.
type FrameType byte

// Frames from the server.
const (
	FrameStart  FrameType = 1 // JSON Started
	FrameStdout FrameType = 2 // raw
	FrameStderr FrameType = 3 // raw
	FramePTY    FrameType = 4 // raw
	FrameEnd    FrameType = 5 // JSON Exit; the last frame
	FrameError  FrameType = 6 // JSON Error; the last frame; the command may still run
	FramePing   FrameType = 7 // empty; sent when nothing else was for a while
)

// Frames from the caller.
const (
	FrameCommand    FrameType = 16 // JSON Command; the first frame
	FrameStdin      FrameType = 17 // raw
	FrameCloseStdin FrameType = 18 // empty
	FrameResize     FrameType = 19 // JSON Size
	FrameSignal     FrameType = 20 // JSON SendSignal
)

// MaxFrame bounds a frame's payload.
const MaxFrame = 1 << 20

const frameHeader = 5

// ErrFrame is wrapped by what ReadFrame returns for bytes that are no frame.
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

// FrameReader reads frames. Memory is bounded by MaxFrame and grows with what
// arrives, not with what a header announces.
type FrameReader struct {
	r      io.Reader
	header [frameHeader]byte
	buf    []byte
}

// NewFrameReader reads from r, which should be buffered.
func NewFrameReader(r io.Reader) *FrameReader { return &FrameReader{r: r} }

// Next returns the next frame; its payload is valid until the next call. It
// returns io.EOF only between frames, and io.ErrUnexpectedEOF inside one. A
// frame that is too long is an error that is ErrFrame, and nothing can be read
// after it; of a command it comes with what a frame may hold, so that the
// answer can say which field made it so.
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
