package audit

import (
	"bivy/internal/clip"
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// truncatedKey is the name under which a payload says that it was cut.
const truncatedKey = "_truncated"

// Truncation is what a cut payload says under "_truncated". It holds no digest
// of the whole payload: that would let a reader test guesses of what was cut.
type Truncation struct {
	Bytes int `json:"bytes"` // length of the whole payload
}

// Bounded encodes v as one line of JSON of at most limit bytes that is safe
// to print: valid UTF-8 in which every character that controls a terminal
// (controls, escapes, bidirectional overrides) is written as \uXXXX.
//
// A longer value is cut so that its shape stays: long strings keep their
// beginning and say how many bytes are missing, long arrays keep their first
// elements, and the object gains "_truncated" with the length of the whole. A
// value that is not an object becomes {"value": …, "_truncated": …}. When no
// cut makes it small enough, only "_truncated" remains. nil becomes {}.
func Bounded(v any, limit int) (json.RawMessage, error) {
	if v == nil {
		return json.RawMessage("{}"), nil
	}
	whole, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	whole = printable(whole)
	if len(whole) <= limit {
		return whole, nil
	}
	mark := Truncation{Bytes: len(whole)}

	dec := json.NewDecoder(bytes.NewReader(whole))
	dec.UseNumber()
	var tree any
	if err := dec.Decode(&tree); err != nil {
		return nil, fmt.Errorf("payload does not read back: %w", err)
	}
	object, ok := tree.(map[string]any)
	if !ok {
		object = map[string]any{"value": tree}
	}
	for _, c := range []cutter{
		{text: 16 << 10, items: 4096, depth: 16},
		{text: 4 << 10, items: 1024, depth: 16},
		{text: 1 << 10, items: 256, depth: 12},
		{text: 256, items: 64, depth: 8},
		{text: 64, items: 16, depth: 4},
	} {
		small := c.object(object, c.depth)
		small[truncatedKey] = mark
		out, err := json.Marshal(small)
		if err != nil {
			return nil, err
		}
		if out = printable(out); len(out) <= limit {
			return out, nil
		}
	}
	return json.Marshal(map[string]any{truncatedKey: mark})
}

// cutter shortens a decoded JSON value.
type cutter struct {
	text  int // bytes kept of a string
	items int // elements kept of an array or object
	depth int // levels kept
}

func (c cutter) value(v any, depth int) any {
	switch v := v.(type) {
	case string:
		return c.string(v)
	case json.Number:
		return json.Number(c.number(string(v)))
	case []any:
		if depth == 0 {
			return fmt.Sprintf("…[%d elements]", len(v))
		}
		kept := make([]any, 0, min(len(v), c.items)+1)
		for _, e := range v[:min(len(v), c.items)] {
			kept = append(kept, c.value(e, depth-1))
		}
		if gone := len(v) - c.items; gone > 0 {
			kept = append(kept, fmt.Sprintf("…[+%d elements]", gone))
		}
		return kept
	case map[string]any:
		if depth == 0 {
			return fmt.Sprintf("…[%d fields]", len(v))
		}
		return c.object(v, depth-1)
	}
	return v
}

func (c cutter) object(v map[string]any, depth int) map[string]any {
	names := make([]string, 0, len(v))
	for k := range v {
		names = append(names, k)
	}
	slices.Sort(names) // which fields are kept must not depend on map order
	small := make(map[string]any, min(len(v), c.items)+2)
	for _, k := range names[:min(len(names), c.items)] {
		small[c.string(k)] = c.value(v[k], depth)
	}
	if gone := len(names) - c.items; gone > 0 {
		small["…"] = fmt.Sprintf("[+%d fields]", gone)
	}
	return small
}

func (c cutter) string(s string) string { return clip.Counted(s, c.text) }

// number replaces a number of more than 40 digits, which no other cut shortens.
func (c cutter) number(s string) string {
	if len(s) > 40 {
		return "0"
	}
	return s
}

// printable rewrites encoded JSON so that it holds valid UTF-8 and no
// character that controls a terminal. Outside ASCII, JSON has characters only
// inside strings, where the \u form means the same.
func printable(b []byte) []byte {
	clean := true
	for i := 0; i < len(b) && clean; {
		if c := b[i]; c < utf8.RuneSelf {
			clean = c != 0x7f
			i++
			continue
		}
		r, n := utf8.DecodeRune(b[i:])
		clean = unicode.IsPrint(r) && (r != utf8.RuneError || n > 1)
		i += n
	}
	if clean {
		return b
	}
	out := make([]byte, 0, len(b)+64)
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		switch {
		case r < 0x7f, r > 0x7f && unicode.IsPrint(r) && (r != utf8.RuneError || n > 1):
			out = append(out, b[:n]...)
		case r >= 0x10000:
			high, low := utf16.EncodeRune(r)
			out = escape(escape(out, high), low)
		default:
			out = escape(out, r)
		}
		b = b[n:]
	}
	return out
}

// escape appends r, which has 16 bits, as JSON's \uXXXX.
func escape(out []byte, r rune) []byte {
	const digits = "0123456789abcdef"
	return append(out, '\\', 'u', digits[r>>12&15], digits[r>>8&15], digits[r>>4&15], digits[r&15])
}
