package audit

import (
	"strconv"
	"strings"

	"bivy/internal/kind"
	"bivy/internal/session"
)

// RecordID names a record: "session/<session id>", "addenda/<session id>" or
// "system/<node id>/<segment number>", with segments numbered from 1.
type RecordID string

// MaxNode is the length of a node's name in bytes.
const MaxNode = 128

const (
	sessionPrefix = "session/"
	addendaPrefix = "addenda/"
	systemPrefix  = "system/"
)

// SessionRecord returns the name of the record of a session.
func SessionRecord(id session.ID) RecordID { return RecordID(sessionPrefix + string(id)) }

// AddendaRecord returns the name of the record of what became known about a
// session after its seal.
func AddendaRecord(id session.ID) RecordID { return RecordID(addendaPrefix + string(id)) }

// SystemRecord returns the name of a segment of the record of a node.
func SystemRecord(node session.NodeID, segment uint64) RecordID {
	return RecordID(systemPrefix + string(node) + "/" + strconv.FormatUint(segment, 10))
}

// ParseRecordID checks that s names a record; it fails with Invalid.
func ParseRecordID(s string) (RecordID, error) {
	r := RecordID(s)
	if _, ok := r.Session(); ok {
		return r, nil
	}
	if _, _, ok := r.Segment(); ok {
		return r, nil
	}
	return "", kind.Errorf(kind.Invalid, "%.64q does not name a record", s)
}

// Session returns the session of a session's record or addenda. ok is false
// for every other record.
func (r RecordID) Session() (id session.ID, ok bool) {
	text, found := strings.CutPrefix(string(r), sessionPrefix)
	if !found {
		if text, found = strings.CutPrefix(string(r), addendaPrefix); !found {
			return "", false
		}
	}
	id, err := session.ParseID(text)
	return id, err == nil
}

// Addenda reports whether the record is the addenda of a session.
func (r RecordID) Addenda() bool { return strings.HasPrefix(string(r), addendaPrefix) }

// Segment returns the node and the number of a segment of a system record. ok
// is false for every other record.
func (r RecordID) Segment() (node session.NodeID, number uint64, ok bool) {
	text, found := strings.CutPrefix(string(r), systemPrefix)
	if !found {
		return "", 0, false
	}
	name, digits, found := strings.Cut(text, "/")
	number, err := strconv.ParseUint(digits, 10, 63)
	node = session.NodeID(name)
	if !found || err != nil || number == 0 || checkNode(node) != nil || SystemRecord(node, number) != r {
		return "", 0, false
	}
	return node, number, true
}

// bounds returns the actions that open and close the record; both are empty
// for addenda, which have no fixed beginning or end.
func (r RecordID) bounds() (opens, closes Action) {
	switch {
	case strings.HasPrefix(string(r), sessionPrefix):
		return SessionCreated, SessionEnded
	case strings.HasPrefix(string(r), systemPrefix):
		return SegmentOpened, SegmentClosed
	}
	return "", ""
}

// Closes returns the action of the last event of the record, or "" for
// addenda, which stay open.
func (r RecordID) Closes() Action { _, closes := r.bounds(); return closes }

// checkNode accepts names of printable ASCII without spaces and slashes.
func checkNode(n session.NodeID) error {
	if n == "" || len(n) > MaxNode || !ascii(string(n)) || strings.ContainsAny(string(n), " /") {
		return kind.Errorf(kind.Invalid, "%.64q is not a node id: want 1 to %d printable ASCII characters without spaces and slashes", string(n), MaxNode)
	}
	return nil
}
