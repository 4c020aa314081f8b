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
				if want := (Truncation{Bytes: len(whole)}); *marked.T != want {
					t.Errorf("mark %+v, want %+v", *marked.T, want)
				}
				// A digest of the whole would let a reader test guesses of it.
				if sum := sha256.Sum256(whole); bytes.Contains(got, []byte(hex.EncodeToString(sum[:]))) {
					t.Error("the cut payload holds the digest of the whole")
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
	add := func(seq uint64, a Action, concludes uint64, ok bool) {
		t.Helper()
		if err := in.Add(seq, a, "r", concludes); (err == nil) != ok {
			t.Errorf("event %d, %s concludes %d: %v", seq, a, concludes, err)
		}
	}
	add(1, StepDone, 0, true)
	add(2, CommandIntent, 0, true)
	add(3, "future.thing.intent", 0, true)
	add(4, CommandIntent, 0, true) // announced again: another intent
	if open := in.Open(); len(open) != 3 || open[0].Seq != 2 || open[1].Action != "future.thing.intent" || open[2].Ref != "r" {
		t.Errorf("open %v", open)
	}
	clone := in.Clone()
	add(5, CommandEnded, 1, false)  // not an intent
	add(5, CommandEnded, 5, false)  // itself
	add(5, CommandEnded, 99, false) // not there yet
	add(5, StepIntent, 2, false)    // an intent
	add(5, "future.other", 3, true)
	add(6, "future.other", 3, false) // twice
	add(6, StepFailed, 0, true)      // an interim report
	add(7, IntentLost, 2, true)
	if in.Len() != 1 || clone.Len() != 3 {
		t.Errorf("%d open, %d in the clone", in.Len(), clone.Len())
	}
}
