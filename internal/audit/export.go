package audit

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"

	"bivy/internal/session"
)

// ExportFormat is the version of the export format that this build reads and
// writes.
//
// An export is JSON Lines in UTF-8, each line ended by a newline. That of a
// session:
//
//	{"bivy_record":1,"record":"session/<id>"}
//	{"rotations":[{…},…]}                                  when the key was ever replaced
//	{"event":"<skeleton>","hash":"<hex>","salt":"<hex>","payload":"<payload>"}
//	…
//	{"seal":{"payloadType":…,"payload":…,"signatures":[…]}}  once the session has ended
//	{"event":…}                                            addenda, when there are any
//	…
//	{"addenda_seal":{…}}                                   the signed head of the addenda
//
// That of the system record of a node holds all segments in sequence, of which
// the last may be open:
//
//	{"bivy_record":1,"record":"system/<node>"}
//	{"rotations":[…]}
//	{"event":…}                                            segment 1
//	…
//	{"seal":{…}}
//	{"event":…}                                            segment 2
//	…
//
// Skeletons and payloads are JSON strings, because what was hashed is their
// exact bytes, which tools that rewrite JSON must not change. An event whose
// payload was erased has neither salt nor payload.
//
// To check an export by other means: hash is SHA-256 of "bivy/audit/event/v1\n"
// and the skeleton; prev in each skeleton is the hash of the event before, or
// what Start says; commit is SHA-256 of salt (32 bytes) and payload; the
// subject of a seal is SHA-256 of
// "bivy/audit/record/v1\n<record>\n<count>\n<hash of the last event>".
const ExportFormat = 1

// maxLine bounds a line of an export in bytes. The longest is a seal with the
// longest statement.
const maxLine = 8 << 20

type headerLine struct {
	Format int      `json:"bivy_record"`
	Record RecordID `json:"record"`
}

type rotationsLine struct {
	Rotations []Seal `json:"rotations"`
}

type eventLine struct {
	Event   *string `json:"event"`
	Hash    string  `json:"hash"`
	Salt    string  `json:"salt,omitempty"`
	Payload string  `json:"payload,omitempty"`
}

type sealLine struct {
	Seal *Seal `json:"seal"`
}

type addendaSealLine struct {
	Seal *Seal `json:"addenda_seal"`
}

// Each calls yield for each event of a record in order and stops when that
// fails.
type Each func(yield func(Stored) error) error

// SessionExport is what Export writes.
type SessionExport struct {
	Session     session.ID // whose record it is
	Rotations   []Seal     // Signer.Rotations
	Events      Each       // of the session's record
	Seal        *Seal      // nil for a session that has not ended
	Addenda     Each       // nil when there are none
	AddendaSeal *Seal      // nil when there are none
}

// Export writes a session's record, its seal and its addenda to w. It does not
// verify what it writes.
func Export(w io.Writer, x SessionExport) error {
	out := newExporter(w, SessionRecord(x.Session), x.Rotations)
	out.events(x.Events)
	if x.Seal != nil {
		out.line(sealLine{Seal: x.Seal})
	}
	if x.Addenda != nil {
		out.events(x.Addenda)
	}
	if x.AddendaSeal != nil {
		out.line(addendaSealLine{Seal: x.AddendaSeal})
	}
	if err := out.finish(); err != nil {
		return fmt.Errorf("export of session %s: %w", x.Session, err)
	}
	return nil
}

// SystemExport is what ExportSystem writes.
type SystemExport struct {
	Node      session.NodeID  // whose system record it is
	Rotations []Seal          // Signer.Rotations
	Segments  []SegmentExport // all of them, from segment 1
}

// SegmentExport is one segment of a SystemExport.
type SegmentExport struct {
	Events Each  // of the segment
	Seal   *Seal // nil for the segment that is open, which is the last
}

// ExportSystem writes the system record of a node to w. It does not verify
// what it writes.
func ExportSystem(w io.Writer, x SystemExport) error {
	out := newExporter(w, RecordID(systemPrefix+string(x.Node)), x.Rotations)
	for _, s := range x.Segments {
		out.events(s.Events)
		if s.Seal != nil {
			out.line(sealLine{Seal: s.Seal})
		}
	}
	if err := out.finish(); err != nil {
		return fmt.Errorf("export of the system record of node %s: %w", x.Node, err)
	}
	return nil
}

// exporter writes lines and keeps the first error.
type exporter struct {
	buf *bufio.Writer
	enc *json.Encoder
	err error
}

func newExporter(w io.Writer, r RecordID, rotations []Seal) *exporter {
	buf := bufio.NewWriterSize(w, 64<<10)
	out := &exporter{buf: buf, enc: json.NewEncoder(buf)}
	out.enc.SetEscapeHTML(false)
	out.line(headerLine{Format: ExportFormat, Record: r})
	if len(rotations) > 0 {
		out.line(rotationsLine{Rotations: rotations})
	}
	return out
}

func (x *exporter) line(v any) {
	if x.err == nil {
		x.err = x.enc.Encode(v)
	}
}

func (x *exporter) events(each Each) {
	if x.err != nil {
		return
	}
	x.err = each(func(e Stored) error {
		raw := string(e.Raw)
		return x.enc.Encode(eventLine{Event: &raw, Hash: e.Hash, Salt: hex.EncodeToString(e.Salt), Payload: string(e.Payload)})
	})
}

func (x *exporter) finish() error {
	if x.err == nil {
		x.err = x.buf.Flush()
	}
	return x.err
}
