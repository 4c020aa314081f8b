package api

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"unicode/utf8"

	"bivy/client"
	"bivy/internal/workload"
)

// encoder writes a command's stream in one of its two forms.
type encoder interface {
	mediaType() string
	started(w *bufio.Writer, s client.Started) error
	data(w *bufio.Writer, kind workload.EventKind, b []byte) error
	ended(w *bufio.Writer, e client.Exit) error
	failed(w *bufio.Writer, e client.Error) error
	ping(w *bufio.Writer) error
}

func newEncoder(mediaType string) encoder {
	if mediaType == client.StreamType {
		return frameEncoder{}
	}
	return &lineEncoder{}
}

// frameEncoder writes binary frames.
type frameEncoder struct{}

func (frameEncoder) mediaType() string { return client.StreamType }

func (frameEncoder) frame(w *bufio.Writer, t client.FrameType, b []byte) error {
	for {
		part := b[:min(len(b), client.MaxFrame)]
		var head [5]byte
		head[0] = byte(t)
		binary.BigEndian.PutUint32(head[1:], uint32(len(part)))
		if _, err := w.Write(head[:]); err != nil {
			return err
		}
		if _, err := w.Write(part); err != nil {
			return err
		}
		if b = b[len(part):]; len(b) == 0 {
			return nil
		}
	}
}

func (f frameEncoder) json(w *bufio.Writer, t client.FrameType, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return f.frame(w, t, b)
}

func (f frameEncoder) started(w *bufio.Writer, s client.Started) error {
	return f.json(w, client.FrameStart, s)
}

func (f frameEncoder) data(w *bufio.Writer, kind workload.EventKind, b []byte) error {
	switch kind {
	case workload.Stdout:
		return f.frame(w, client.FrameStdout, b)
	case workload.Stderr:
		return f.frame(w, client.FrameStderr, b)
	case workload.PTY:
		return f.frame(w, client.FramePTY, b)
	case workload.End:
	}
	return nil
}

func (f frameEncoder) ended(w *bufio.Writer, e client.Exit) error {
	return f.json(w, client.FrameEnd, e)
}

func (f frameEncoder) failed(w *bufio.Writer, e client.Error) error {
	return f.json(w, client.FrameError, e)
}

func (f frameEncoder) ping(w *bufio.Writer) error { return f.frame(w, client.FramePing, nil) }

// lineEncoder writes JSON lines for people and for tools without a client.
// Output is text where it is UTF-8; a character that is cut between two
// pieces waits for its rest.
type lineEncoder struct {
	held [workload.End + 1][]byte
}

func (*lineEncoder) mediaType() string { return client.NDJSONType }

func (*lineEncoder) line(w *bufio.Writer, v client.CommandEvent) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if _, err := w.Write(b); err != nil {
		return err
	}
	return w.WriteByte('\n')
}

func (l *lineEncoder) started(w *bufio.Writer, s client.Started) error {
	return l.line(w, client.CommandEvent{Type: "start", Started: &s})
}

func (l *lineEncoder) data(w *bufio.Writer, kind workload.EventKind, b []byte) error {
	if held := l.held[kind]; len(held) > 0 {
		b = append(held, b...)
		l.held[kind] = nil
	}
	if n := incomplete(b); n > 0 {
		l.held[kind] = append([]byte(nil), b[len(b)-n:]...)
		b = b[:len(b)-n]
	}
	return l.piece(w, kind, b)
}

func (l *lineEncoder) piece(w *bufio.Writer, kind workload.EventKind, b []byte) error {
	if len(b) == 0 {
		return nil
	}
	ev := client.CommandEvent{}
	switch kind {
	case workload.Stdout:
		ev.Type = "stdout"
	case workload.Stderr:
		ev.Type = "stderr"
	case workload.PTY:
		ev.Type = "pty"
	case workload.End:
	}
	if utf8.Valid(b) {
		ev.Text = string(b)
	} else {
		ev.Data = b
	}
	return l.line(w, ev)
}

// release writes what was held back.
func (l *lineEncoder) release(w *bufio.Writer) error {
	for kind, b := range l.held {
		if err := l.piece(w, workload.EventKind(kind), b); err != nil {
			return err
		}
		l.held[kind] = nil
	}
	return nil
}

// incomplete returns how many bytes at the end of b begin a character that
// is not there in full.
func incomplete(b []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		if c := b[len(b)-n]; utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(b[len(b)-n:]) {
				return n
			}
			return 0
		}
	}
	return 0
}

func (l *lineEncoder) ended(w *bufio.Writer, e client.Exit) error {
	if err := l.release(w); err != nil {
		return err
	}
	return l.line(w, client.CommandEvent{Type: "end", Exit: &e})
}

func (l *lineEncoder) failed(w *bufio.Writer, e client.Error) error {
	if err := l.release(w); err != nil {
		return err
	}
	return l.line(w, client.CommandEvent{Type: "error", Error: &e})
}

func (l *lineEncoder) ping(w *bufio.Writer) error {
	return l.line(w, client.CommandEvent{Type: "ping"})
}
