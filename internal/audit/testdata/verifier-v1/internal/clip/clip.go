// Package clip shortens text to a limit of bytes without breaking a character.
package clip

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

const ellipsis = "…"

// Text returns s as valid UTF-8 of at most limit bytes. Text that does not fit
// is cut between two characters and ends in "…"; where limit has no room for
// that mark, nothing is left. Each run of bytes that is not UTF-8 becomes one
// U+FFFD. Text that fits and is valid is returned unchanged.
func Text(s string, limit int) string {
	s = strings.ToValidUTF8(s, string(utf8.RuneError))
	if len(s) <= limit {
		return s
	}
	if limit < len(ellipsis) {
		return ""
	}
	return s[:boundary(s, limit-len(ellipsis))] + ellipsis
}

// Counted is [Text] with a mark that says how many bytes are missing, as in
// "some text…[+1204 bytes]". Where limit has no room for that mark, it is
// Text.
func Counted(s string, limit int) string {
	s = strings.ToValidUTF8(s, string(utf8.RuneError))
	if len(s) <= limit {
		return s
	}
	// The number of missing bytes is at most len(s), so this mark is at least
	// as long as the final one.
	room := limit - len(mark(len(s)))
	if room < 0 {
		return Text(s, limit)
	}
	n := boundary(s, room)
	return s[:n] + mark(len(s)-n)
}

func mark(missing int) string { return fmt.Sprintf("%s[+%d bytes]", ellipsis, missing) }

// boundary returns the last place at or before n where a character of s
// begins. s is longer than n.
func boundary(s string, n int) int {
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return n
}
