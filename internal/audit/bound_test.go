package audit

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
)

func TestBounded(t *testing.T) {
	long := strings.Repeat("A", 10<<20)
	many := make([]string, 100_000)
	names := map[string]string{}
	for i := range many {
		many[i] = "x"
		if i < 20_000 {
			names[fmt.Sprint("name", i)] = "v"
		}
	}
	deep := any("bottom")
	for range 200 {
		deep = []any{deep, strings.Repeat("z", 1000)}
	}
	var wide any = map[string]any{}
	for i := range 400 {
		wide.(map[string]any)[fmt.Sprintf("%0300d", i)] = strings.Repeat("w", 300)
	}
	for name, c := range map[string]struct {
		v    any
		want []string // parts that must still be there
		cut  bool
	}{
		"nil":            {nil, []string{"{}"}, false},
		"plain":          {map[string]any{"a": 1, "b": "x"}, []string{`{"a":1,"b":"x"}`}, false},
		"controls":       {"a\x00b\x1b[31m\x07\n\r\x7f", []string{`\u0000`, `\u001b`, `\n`, `\u007f`}, false},
		"C1 and bidi":    {"\u009b2J\u202e\u2066\ufeff", []string{`\u009b`, `\u202e`, `\u2066`, `\ufeff`}, false},
		"astral format":  {"\U000E0041", []string{`\udb40\udc41`}, false},
		"invalid UTF-8":  {"\xff\xfe", []string{`\ufffd`}, false},
		"invalid raw":    {json.RawMessage("\"\xff\""), []string{`\ufffd`}, false},
		"letters stay":   {"é 漢字 😀", []string{"é 漢字 😀"}, false},
		"10 MB argv":     {map[string]any{"argv": []string{"sh", "-c", long}, "cwd": "/tmp"}, []string{`"cwd":"/tmp"`, `"sh"`, "AAAA", "…[+", "bytes]"}, true},
		"1 MB text":      {long[:1<<20], []string{`"value":"AAAA`}, true},
		"1 MB raw":       {json.RawMessage(`"` + long[:1<<20] + `"`), []string{"AAAA"}, true},
		"many elements":  {map[string]any{"argv": many}, []string{`"x"`, "…[+", "elements]"}, true},
		"many names":     {map[string]any{"env": names}, []string{"name", "fields]"}, true},
		"deep":           {map[string]any{"a": deep, "cwd": "/"}, []string{`"cwd":"/"`}, true},
		"wide":           {wide, []string{"www"}, true},
		"1 MB name":      {map[string]int{long[:1<<20]: 1}, []string{"AAAA"}, true},
		"long number":    {json.RawMessage(`{"n":` + strings.Repeat("9", 100_000) + `}`), []string{`"n":0`}, true},
		"escapes galore": {map[string]any{"a": strings.Repeat("\u202e\x1b", 1<<16)}, []string{`\u202e`}, true},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Bounded(c.v, MaxPayload)
			if err != nil {
				t.Fatal(err)
			}
			if len(got) > MaxPayload || bytes.ContainsAny(got, "\n\r") {
				t.Errorf("%d bytes", len(got))
			}
			checkPrintable(t, got)
			for _, part := range c.want {
				if !bytes.Contains(got, []byte(part)) {
					t.Errorf("no %q in %.300s", part, got)
				}
			}
			var marked struct {
				T *Truncation `json:"_truncated"`
			}
			if bytes.HasPrefix(got, []byte("{")) {
				if err := json.Unmarshal(got, &marked); err != nil {
					t.Fatal(err)
				}
			}
			if c.cut != (marked.T != nil) {
				t.Fatalf("marked as cut: %v, want %v: %.200s", marked.T, c.cut, got)
			}
			if c.cut {
				whole, err := Bounded(c.v, math.MaxInt)
				if err != nil {
					t.Fatal(err)
				}
				sum := sha256.Sum256(whole)
				if want := (Truncation{Bytes: len(whole), SHA256: hex.EncodeToString(sum[:])}); *marked.T != want {
					t.Errorf("mark %+v, want %+v", *marked.T, want)
				}
			}
		})
	}
	for _, bad := range []any{make(chan int), math.NaN(), json.RawMessage("{"), func() {}} {
		if got, err := Bounded(bad, MaxPayload); err == nil {
			t.Errorf("%T: got %s", bad, got)
		}
	}
	// Even where nothing helps the result stays within its bound.
	got, err := Bounded(wide, 200)
	if err != nil || len(got) > 200 || !bytes.Contains(got, []byte(truncatedKey)) {
		t.Errorf("%d bytes, %v: %s", len(got), err, got)
	}
}

func TestIntents(t *testing.T) {
	var in Intents
	seq := uint64(0)
	add := func(a Action, ref string) { seq++; in.Add(seq, a, ref) }
	for _, c := range []struct{ intent, wrong, right Action }{
		{StepIntent, CommandEnded, StepDone},
		{StepIntent, StepIntent, StepFailed},
		{CommandIntent, CommandStarted, CommandEnded},
		{CommandIntent, StepDone, CommandRefused},
		{FileWriteIntent, FileRead, FileWritten},
		{FileWriteIntent, FileDone, FileFailed},
		{FileIntent, FileWritten, FileDone},
		{FileIntent, CommandEnded, FileRead},
		{FileIntent, CommandEnded, FileFailed},
		{"future.intent", StepDone, IntentLost},
		{CommandIntent, StepDone, IntentLost},
	} {
		add(c.intent, "a")
		add(c.wrong, "a")
		add(c.right, "b")
		if open := in.Open(); len(open) != 1 || open[0].Action != c.intent || open[0].Ref != "a" {
			t.Errorf("%s: open %v", c.intent, open)
		}
		clone := in.Clone()
		add(c.right, "a")
		if in.Len() != 0 || clone.Len() != 1 {
			t.Errorf("%s after %s: %d open, %d in the clone", c.intent, c.right, in.Len(), clone.Len())
		}
	}
}
