package audit

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"bivy/internal/session"
)

// ExportFormat is the version of the export format that this build writes.
//
// An export is JSON Lines in UTF-8, each line ended by a newline:
//
//	{"bivy_record":1,"session":"<id>"}
//	{"event":"<skeleton>","hash":"<hex>","salt":"<hex>","payload":"<payload>"}
//	…
//	{"seal":{"payloadType":…,"payload":…,"signatures":[…]}}
//
// The skeleton and the payload are carried as JSON strings, because what was
// hashed is their exact bytes and tools that rewrite JSON must not touch them.
// An event whose payload was erased has neither salt nor payload. A record of
// a session that has not ended has no seal line.
//
// To check an export by other means: hash is SHA-256 of "bivy/audit/event/v1\n"
// and the skeleton; prev in each skeleton is the hash of the line before;
// commit is SHA-256 of salt (32 bytes) and payload; the seal's subject is
// SHA-256 of "bivy/audit/record/v1\n<session>\n<count>\n<hash of the last>".
const ExportFormat = 1

// maxLine bounds a line of an export. The longest honest one is a seal with
// every residual listed.
const maxLine = 2 << 20

type headerLine struct {
	Format  int        `json:"bivy_record"`
	Session session.ID `json:"session"`
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

// Export writes the record of session id to w. events calls its argument for
// each event in order and stops when that fails; seal is nil for a session
// that has not ended. Export does not verify: what it writes is what was kept.
func Export(w io.Writer, id session.ID, events func(yield func(Stored) error) error, seal *Seal) error {
	buf := bufio.NewWriterSize(w, 64<<10)
	enc := json.NewEncoder(buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(headerLine{Format: ExportFormat, Session: id}); err != nil {
		return fmt.Errorf("export of session %s: %w", id, err)
	}
	err := events(func(e Stored) error {
		raw := string(e.Raw)
		return enc.Encode(eventLine{Event: &raw, Hash: e.Hash, Salt: hex.EncodeToString(e.Salt), Payload: string(e.Payload)})
	})
	if err == nil && seal != nil {
		err = enc.Encode(sealLine{Seal: seal})
	}
	if err == nil {
		err = buf.Flush()
	}
	if err != nil {
		return fmt.Errorf("export of session %s: %w", id, err)
	}
	return nil
}

// strict decodes JSON with no room for two readings: one value, no unknown
// and no repeated fields, names spelled exactly.
func strict(data []byte, v any) error {
	if err := checkNames(data); err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one value")
	}
	return nil
}

// maxDepth bounds the nesting of what strict decodes; a statement has four
// levels.
const maxDepth = 16

// checkNames refuses JSON whose meaning depends on the reader: names that
// occur twice in an object or differ only by case, which Go takes for the
// same, and names outside ASCII.
func checkNames(data []byte) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	type level struct {
		names map[string]bool // nil in an array
		value bool            // a value is next, not a name
	}
	var stack []level
	for {
		tok, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		top := len(stack) - 1
		if name, ok := tok.(string); ok && top >= 0 && stack[top].names != nil && !stack[top].value {
			if err := checkName(name, stack[top].names); err != nil {
				return err
			}
			stack[top].value = true
			continue
		}
		switch tok {
		case json.Delim('{'), json.Delim('['):
			if len(stack) == maxDepth {
				return fmt.Errorf("nested deeper than %d levels", maxDepth)
			}
			var l level
			if tok == json.Delim('{') {
				l.names = make(map[string]bool)
			}
			stack = append(stack, l)
			continue
		case json.Delim('}'), json.Delim(']'):
			stack = stack[:top]
		}
		if top = len(stack) - 1; top >= 0 {
			stack[top].value = false
		}
	}
}

func checkName(name string, seen map[string]bool) error {
	if !ascii(name) || name != strings.ToLower(name) && name != "payloadType" && name != "predicateType" {
		return fmt.Errorf("unexpected name %.64q", name)
	}
	if seen[name] {
		return fmt.Errorf("name %.64q occurs twice", name)
	}
	seen[name] = true
	return nil
}
