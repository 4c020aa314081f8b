package api

import (
	"encoding/json"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"bivy/client"
	"bivy/internal/audit"
	"bivy/internal/auth"
	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/template"
	"bivy/internal/workload"
)

func TestDecodeStrict(t *testing.T) {
	for _, tc := range []struct {
		name, in, field, text string
	}{
		{"empty", ``, "", "empty"},
		{"blank", " \n", "", "empty"},
		{"not an object", `[]`, "", "want an object"},
		{"null", `null`, "", "null"},
		{"unknown", `{"argv":["a"],"shell":true}`, "shell", "unknown field"},
		{"another case", `{"Argv":["a"]}`, "Argv", "unknown field"},
		{"unknown deep", `{"pty":{"cols":1,"rows":1,"x":1}}`, "pty.x", "unknown field"},
		{"twice", `{"cwd":"/","cwd":"/tmp"}`, "cwd", "given twice"},
		{"twice escaped", `{"cwd":"/","c\u0077d":"/tmp"}`, "cwd", "given twice"},
		{"twice in a map", `{"env":{"A":"1","A":"2"}}`, "env.A", "given twice"},
		{"text for a list", `{"argv":"ls"}`, "argv", "want a list"},
		{"number for text", `{"argv":["a",1]}`, "argv[1]", "want text"},
		{"number for text in a map", `{"env":{"A":1}}`, "env.A", "want text"},
		{"text for a boolean", `{"stdin":"yes"}`, "stdin", "true or false"},
		{"null inside", `{"pty":null}`, "pty", "null"},
		{"object for text", `{"cwd":{}}`, "cwd", "want text"},
		{"fraction", `{"pty":{"cols":1.5,"rows":1}}`, "pty.cols", "whole number"},
		{"too large", `{"pty":{"cols":65536,"rows":1}}`, "pty.cols", "0 to 65535"},
		{"negative", `{"pty":{"cols":-1,"rows":1}}`, "pty.cols", "0 to 65535"},
		{"more", `{} {}`, "", "data after the end"},
		{"more brackets", `{}}`, "", "data after the end"},
		{"cut", `{"argv":["a"`, "argv", "ends early"},
		{"comma", `{"argv":["a",]}`, "argv[1]", "not JSON"},
		{"comment", `{"argv":["a"] /* x */}`, "", "not JSON"},
		{"not UTF-8", "{\"cwd\":\"\xff\"}", "", "UTF-8"},
		{"half a pair", `{"cwd":"\ud800"}`, "cwd", "surrogate"},
		{"huge number", `{"timeout_seconds":1e999}`, "timeout_seconds", "want a number"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var cmd client.Command
			err := decodeStrict([]byte(tc.in), false, &cmd)
			if !kind.Is(err, kind.Invalid) {
				t.Fatalf("%v; want an error of kind invalid", err)
			}
			if kind.Field(err) != tc.field || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("field %q: %v; want %q and %q", kind.Field(err), err, tc.field, tc.text)
			}
		})
	}
	t.Run("good", func(t *testing.T) {
		var cmd client.Command
		in := `{"argv":["a","\ufffd","é\u00e9\ud83c\udfd5"],"env":{"A":""},"pty":{"cols":80,"rows":24},"timeout_seconds":1.5,"stdin":true}`
		if err := decodeStrict([]byte(in), false, &cmd); err != nil {
			t.Fatal(err)
		}
		want := client.Command{Argv: []string{"a", "\ufffd", "éé🏕"}, Env: map[string]string{"A": ""}, PTY: &client.Size{Cols: 80, Rows: 24}, TimeoutSeconds: 1.5, Stdin: true}
		if diff := cmp.Diff(want, cmd); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("embedded", func(t *testing.T) {
		var in client.CreateSession
		if err := decodeStrict([]byte(`{"template":"base","trigger":"cron","resources":{"pids":100}}`), false, &in); err != nil {
			t.Fatal(err)
		}
		if in.Template != "base" || in.Trigger != "cron" || in.Resources.PIDs != 100 {
			t.Errorf("%+v", in)
		}
	})
	t.Run("too long", func(t *testing.T) {
		var cmd client.Command
		err := decodeStrict([]byte(`{"argv":["a"],"cwd":"/","env":{"A":"`+strings.Repeat("x", 1000)), true, &cmd)
		if kind.Field(err) != "env" || kind.Hint(err) == "" {
			t.Errorf("%v; want the field env and a hint", err)
		}
	})
}

func FuzzDecodeStrict(f *testing.F) {
	for _, s := range []string{`{}`, `{"argv":["a"],"env":{"A":"1"}}`, `{"pty":{"cols":1,"rows":2}}`, `{"cwd":"\ud800"}`, `{"argv":["a"`, `{"timeout_seconds":1e9}`, `[`, `{"a":1,"a":2}`} {
		f.Add([]byte(s), false)
		f.Add([]byte(s), true)
	}
	f.Fuzz(func(t *testing.T, data []byte, cut bool) {
		var cmd client.Command
		err := decodeStrict(data, cut, &cmd)
		if err != nil {
			if !kind.Is(err, kind.Invalid) {
				t.Fatalf("%v is not invalid", err)
			}
			return
		}
		b, err := json.Marshal(cmd)
		if err != nil {
			if math.IsInf(cmd.TimeoutSeconds, 0) {
				t.Fatalf("infinity was let in")
			}
			t.Fatal(err)
		}
		if cmd.Argv == nil {
			return // null, which is not taken
		}
		var again client.Command
		if err := decodeStrict(b, false, &again); err != nil {
			t.Fatalf("%s: %v", b, err)
		}
		if diff := cmp.Diff(cmd, again, cmp.Transformer("empty", func(m map[string]string) int { return len(m) })); diff != "" {
			t.Fatal(diff)
		}
	})
}

// FuzzCreateSession: no request panics; what is wrong with one is said in few
// words, and what is taken survives being written and read, with one digest.
func FuzzCreateSession(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"template":"base","timeout_seconds":60}`, `{"env":{"A":"b"},"labels":{"t":"x"},"on_behalf_of":"ann"}`, `{"TEMPLATE":"x"}`, `{"version":9}`,
		`{"resources":{"cpu_millis":1000,"memory_mib":512,"disk_mib":64,"pids":100}}`, `{"env":{"\u0000":""}}`, `{"resources":{"pids":99999999999999999999}}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var in client.CreateSession
		if err := decodeStrict(data, false, &in); err != nil {
			if !kind.Is(err, kind.Invalid) {
				t.Errorf("%v is %s", err, kind.Of(err))
			}
			return
		}
		full := specIn(in.Spec).WithDefaults()
		if err := full.Validate(); err != nil {
			if !kind.Is(err, kind.Invalid) || kind.Field(err) == "" || len(err.Error()) > 1000 {
				t.Errorf("%v: kind %s, field %q", err, kind.Of(err), kind.Field(err))
			}
			return
		}
		text, err := json.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		var again client.CreateSession
		if err := decodeStrict(text, false, &again); err != nil {
			t.Fatalf("%s does not read back: %v", text, err)
		}
		a, err := full.Digest()
		if err != nil {
			t.Fatal(err)
		}
		if b, err := specIn(again.Spec).WithDefaults().Digest(); err != nil || a != b {
			t.Errorf("digest %s and after reading back %s, %v", a, b, err)
		}
	})
}

// fill sets everything in v to something that is not zero.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				fill(v.Field(i))
			}
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		k, e := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(k)
		fill(e)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(k, e)
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64, reflect.Int32:
		v.SetInt(int64(1e9))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(7)
	case reflect.Float64:
		v.SetFloat(3)
	default:
	}
}

func filled[T any]() T {
	var v T
	fill(reflect.ValueOf(&v).Elem())
	return v
}

// zeros names what is zero in v, and in what it holds.
func zeros(v reflect.Value, at string) []string {
	var out []string
	if v.Kind() == reflect.Pointer && !v.IsNil() {
		return zeros(v.Elem(), at)
	}
	if v.IsZero() && v.Kind() != reflect.Struct {
		return []string{at}
	}
	if v.Kind() == reflect.Struct {
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() {
				out = append(out, zeros(v.Field(i), at+"."+f.Name)...)
			}
		}
	}
	return out
}

// TestNothingIsForgotten converts values without a zero in them.
func TestNothingIsForgotten(t *testing.T) {
	check := func(name string, v any, except ...string) {
		t.Helper()
		for _, z := range zeros(reflect.ValueOf(v), name) {
			ok := false
			for _, e := range except {
				ok = ok || strings.HasPrefix(z, name+"."+e)
			}
			if !ok {
				t.Errorf("%s is forgotten", z)
			}
		}
	}
	check("specIn", specIn(filled[client.Spec]()))
	check("specOut", specOut(filled[session.Spec]()))
	check("sessionOut", sessionOut(filled[session.Session]()), "CreatedAt", "StartedAt", "EndedAt", "Deadline")
	check("commandIn", commandIn(filled[client.Command]()))
	info := filled[workload.CommandInfo]()
	check("commandOut", commandOut(info), "Running", "StartedAt")
	check("exitOut", exitOut(filled[workload.Exit]()))
	check("fileOut", fileOut(filled[workload.FileInfo]()), "RawPath", "ModTime")
	check("statsOut", statsOut(filled[driver.Stats]()))
	ev := filled[audit.Stored]()
	ev.Event.Record = audit.SessionRecord(session.NewID())
	check("eventOut", eventOut(ev), "Time")
	l := filled[template.Listed]()
	l.Broken = kind.Errorf(kind.Invalid, "x")
	check("templateOut", templateOut(l), "CreatedAt")
	check("templateIn", templateIn(filled[client.BuildTemplate]()))
	check("keyOut", keyOut(filled[auth.Key]()), "CreatedAt", "RevokedAt")

	// What comes in has a place on the wire: the other direction.
	for _, pair := range [][2]any{
		{session.Spec{}, client.Spec{}}, {session.Resources{}, client.Resources{}}, {workload.Command{}, client.Command{}},
		{workload.Exit{}, client.Exit{}}, {driver.Stats{}, client.Stats{}}, {session.Principal{}, client.Principal{}},
		{template.Spec{}, client.BuildTemplate{}}, {template.From{}, client.TemplateSource{}}, {template.Image{}, client.OCIImage{}},
		{template.Credentials{}, client.RegistryCredentials{}}, {session.Session{}, client.SessionInfo{}},
	} {
		in, wire := reflect.TypeOf(pair[0]), reflect.TypeOf(pair[1])
		extra := map[string]int{"Command": 1 /* OnDisconnect */, "SessionInfo": 0 /* Sandbox more, Boot is not shown */}[wire.Name()]
		if in.NumField()+extra != wire.NumField() {
			t.Errorf("%s has %d fields, on the wire %s has %d", in, in.NumField(), wire, wire.NumField())
		}
	}
}
