package wire

import (
	"strings"
	"unicode/utf8"
)

// Names on Linux are bytes; protobuf strings and JSON are UTF-8. A byte that
// is not part of valid UTF-8 is written as one code point of the private range
// below, U+10FE80 for 0x80 up to U+10FEFF for 0xFF. A name that really contains
// such a code point has its four bytes written that way too, so the mapping is
// reversible: Unescape(Escape(s)) == s for every s, and every escaped string
// is valid UTF-8.
const (
	escapeBase  = 0x10FE00
	escapeFirst = escapeBase + 0x80
	escapeLast  = escapeBase + 0xFF
)

// Escape returns name as valid UTF-8. Names that are valid UTF-8 are unchanged,
// except for code points of the range above.
func Escape(name string) string {
	if !needsEscape(name) {
		return name
	}
	var b strings.Builder
	for i := 0; i < len(name); {
		r, n := utf8.DecodeRuneInString(name[i:])
		if (r == utf8.RuneError && n == 1) || (r >= escapeFirst && r <= escapeLast) {
			for _, c := range []byte(name[i : i+n]) {
				b.WriteRune(escapeBase + rune(c))
			}
		} else {
			b.WriteString(name[i : i+n])
		}
		i += n
	}
	return b.String()
}

// Unescape reverses Escape. Text without escapes is returned unchanged, whether
// it is valid UTF-8 or not.
func Unescape(text string) string {
	// All escapes begin with this byte, which most names do not contain.
	if strings.IndexByte(text, 0xF4) < 0 {
		return text
	}
	var b strings.Builder
	for i := 0; i < len(text); {
		r, n := utf8.DecodeRuneInString(text[i:])
		if r >= escapeFirst && r <= escapeLast {
			b.WriteByte(byte(r - escapeBase))
		} else {
			b.WriteString(text[i : i+n])
		}
		i += n
	}
	return b.String()
}

func needsEscape(name string) bool {
	if !utf8.ValidString(name) {
		return true
	}
	if strings.IndexByte(name, 0xF4) < 0 {
		return false
	}
	for _, r := range name {
		if r >= escapeFirst && r <= escapeLast {
			return true
		}
	}
	return false
}
