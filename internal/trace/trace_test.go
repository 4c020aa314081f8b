package trace

import (
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	const id = "4bf92f3577b34da6a3ce929d0e0e4736"
	for header, want := range map[string]ID{
		"00-" + id + "-00f067aa0ba902b7-01":      id,
		"00-" + id + "-00f067aa0ba902b7-00":      id,
		"cc-" + id + "-00f067aa0ba902b7-01":      id, // a later version
		"cc-" + id + "-00f067aa0ba902b7-01-what": id, // which may have more fields
		"00-" + id + "-00f067aa0ba902b7-01-what": "",
		"ff-" + id + "-00f067aa0ba902b7-01":      "",
		"":                                       "",
		id:                                       "",
		"00-" + strings.ToUpper(id) + "-00f067aa0ba902b7-01":     "",
		"00-" + strings.Repeat("0", 32) + "-00f067aa0ba902b7-1":  "",
		"00-" + strings.Repeat("0", 32) + "-00f067aa0ba902b7-01": "",
		"00-" + id + "-0000000000000000-01":                      "",
		"00-" + id[1:] + "-00f067aa0ba902b7-01":                  "",
		"00-" + id + "-00f067aa0ba902b7-0x":                      "",
		"00-" + id + "-00f067aa0ba902b7":                         "",
		strings.Repeat("-", 1<<16):                               "",
	} {
		got, ok := Parse(header)
		if ok != (want != "") || ok && got != want {
			t.Errorf("Parse(%.80q) = %q, %v; want %q", header, got, ok, want)
		}
	}
}

func TestTraceparentParses(t *testing.T) {
	id := New()
	got, ok := Parse(id.Traceparent())
	if !ok || got != id {
		t.Errorf("Parse(%q) = %q, %v", id.Traceparent(), got, ok)
	}
	if ctx := NewContext(t.Context(), id); FromContext(ctx) != id || FromContext(t.Context()) != "" {
		t.Error("the context does not carry the id")
	}
}

func FuzzParse(f *testing.F) {
	f.Add(New().Traceparent())
	f.Fuzz(func(t *testing.T, header string) {
		if id, ok := Parse(header); ok && !id.Valid() {
			t.Errorf("Parse(%q) = %q, which is no trace id", header, id)
		}
	})
}
