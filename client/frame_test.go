package client

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"
)

func TestFrames(t *testing.T) {
	var b []byte
	b = AppendFrame(b, FrameStdout, []byte("hello"))
	b = AppendFrame(b, FrameCloseStdin, nil)
	b = AppendFrame(b, FramePTY, bytes.Repeat([]byte{7}, MaxFrame))
	b, err := AppendFrameJSON(b, FrameEnd, Exit{Code: 3})
	if err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]io.Reader{"whole": bytes.NewReader(b), "by halves": iotest.HalfReader(bytes.NewReader(b)), "with its end": iotest.DataErrReader(bytes.NewReader(b))} {
		f := NewFrameReader(r)
		for _, want := range []struct {
			t FrameType
			n int
		}{{FrameStdout, 5}, {FrameCloseStdin, 0}, {FramePTY, MaxFrame}, {FrameEnd, 10}} {
			if typ, p, err := f.Next(); typ != want.t || len(p) != want.n || err != nil {
				t.Errorf("%s: frame %d of %d bytes, %v; want %d of %d", name, typ, len(p), err, want.t, want.n)
			}
		}
		if _, _, err := f.Next(); !errors.Is(err, io.EOF) {
			t.Errorf("%s: at the end: %v", name, err)
		}
	}
	for name, in := range map[string][]byte{
		"half a header": {2, 0, 0}, "half a payload": {2, 0, 0, 0, 9, 'x'},
	} {
		if _, _, err := NewFrameReader(bytes.NewReader(in)).Next(); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: %v; want an unexpected end", name, err)
		}
	}
	if _, p, err := NewFrameReader(bytes.NewReader([]byte{byte(FrameStdin), 0xff, 0xff, 0xff, 0xff})).Next(); !errors.Is(err, ErrFrame) || p != nil {
		t.Errorf("a frame too long: %v", err)
	}
	long := AppendFrame(nil, FrameCommand, make([]byte, MaxFrame+1))
	if _, p, err := NewFrameReader(bytes.NewReader(long)).Next(); !errors.Is(err, ErrFrame) || len(p) != MaxFrame {
		t.Errorf("a command too long: %d bytes, %v", len(p), err)
	}
}

func FuzzFrameReader(f *testing.F) {
	f.Add(AppendFrame(AppendFrame(nil, FrameStdout, []byte("x")), FrameEnd, []byte(`{"code":0}`)))
	f.Add([]byte{16, 0xff, 0xff, 0xff, 0xff, 1, 2, 3})
	f.Add([]byte{2, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		r := NewFrameReader(bytes.NewReader(data))
		var again []byte
		for {
			typ, p, err := r.Next()
			if err != nil {
				if errors.Is(err, io.EOF) && !bytes.Equal(again, data) {
					t.Fatalf("%d bytes in frames of %d", len(again), len(data))
				}
				if cap(r.buf) > 2*len(data)+(128<<10) {
					t.Fatalf("a buffer of %d for %d bytes", cap(r.buf), len(data))
				}
				return
			}
			again = AppendFrame(again, typ, p)
		}
	})
}
