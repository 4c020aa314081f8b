package clip

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestText(t *testing.T) {
	for _, tt := range []struct {
		in    string
		limit int
		want  string
	}{
		{"", 0, ""}, {"", 5, ""}, {"abc", 3, "abc"}, {"abcd", 3, "…"}, {"abcde", 4, "a…"},
		{"abc", 2, ""}, {"abc", 0, ""}, {"abc", -1, ""},
		{"ééé", 6, "ééé"}, {"éééé", 7, "éé…"}, {"éééé", 6, "é…"}, {"🏕🏕", 7, "🏕…"}, {"🏕🏕", 6, "…"},
		{"a\xff\xfeb", 5, "a\uFFFDb"}, {"a\xff\xfeb", 4, "a…"}, {"\xff", 2, ""},
	} {
		if got := Text(tt.in, tt.limit); got != tt.want {
			t.Errorf("Text(%q, %d) = %q, want %q", tt.in, tt.limit, got, tt.want)
		}
	}
}

func TestCounted(t *testing.T) {
	for _, tt := range []struct {
		in    string
		limit int
		want  string
	}{
		{"abc", 3, "abc"},
		{strings.Repeat("x", 100), 20, "xxxxx…[+95 bytes]"},
		{strings.Repeat("é", 50), 20, "éé…[+96 bytes]"},
		{strings.Repeat("x", 100), 10, "xxxxxxx…"},
	} {
		if got := Counted(tt.in, tt.limit); got != tt.want {
			t.Errorf("Counted(%q, %d) = %q, want %q", tt.in, tt.limit, got, tt.want)
		}
	}
}

func FuzzClip(f *testing.F) {
	for _, s := range []string{"", "abc", "ééé", "\xff\xfe", "a🏕b", strings.Repeat("\xf0\x9f", 20)} {
		for _, n := range []int{0, 3, 7, 30} {
			f.Add(s, n)
		}
	}
	f.Fuzz(func(t *testing.T, s string, limit int) {
		for name, cut := range map[string]string{"Text": Text(s, limit), "Counted": Counted(s, limit)} {
			if !utf8.ValidString(cut) {
				t.Errorf("%s(%q, %d) = %q is not UTF-8", name, s, limit, cut)
			}
			if len(cut) > max(limit, 0) {
				t.Errorf("%s(%q, %d) has %d bytes", name, s, limit, len(cut))
			}
			if len(s) <= limit && utf8.ValidString(s) && cut != s {
				t.Errorf("%s(%q, %d) = %q, though it fits", name, s, limit, cut)
			}
		}
	})
}
