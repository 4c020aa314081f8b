package secret

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

const plain = "hunter2-correct-horse"

type holder struct {
	Public Value
	hidden Value
	list   []Value
	byName map[string]Value
	any    any
}

type document struct{ V Value }

func TestNothingShowsASecret(t *testing.T) {
	v := New(plain)
	h := holder{Public: v, hidden: v, list: []Value{v}, byName: map[string]Value{"a": v}, any: v}
	shown := map[string]string{}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%T%v", "%10.3s", "%p", "% x", "%c", "%U", "%o", "%t", "%e"} {
		args := func(x any) []any {
			if verb == "%T%v" {
				return []any{x, x}
			}
			return []any{x}
		}
		shown["value "+verb] = fmt.Sprintf(verb, args(v)...)
		shown["pointer "+verb] = fmt.Sprintf(verb, args(&v)...)
		shown["holder "+verb] = fmt.Sprintf(verb, args(h)...)
		shown["holder pointer "+verb] = fmt.Sprintf(verb, args(&h)...)
		shown["slice "+verb] = fmt.Sprintf(verb, args([]holder{h})...)
	}
	shown["string"] = v.String() + v.GoString()
	shown["error"] = fmt.Errorf("dial with %s: %v", v, h).Error()
	for name, marshal := range map[string]func(any) ([]byte, error){"json": json.Marshal, "xml": xml.Marshal} {
		out, err := marshal(document{v})
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(out), Redacted) {
			t.Errorf("%s: got %s, want it to say %s", name, out, Redacted)
		}
		shown[name] = string(out)
	}
	var text, js bytes.Buffer
	slog.New(slog.NewTextHandler(&text, nil)).Info("m", "v", v, "h", h, "p", &h)
	slog.New(slog.NewJSONHandler(&js, nil)).Info("m", "v", v, "h", h, "p", &h)
	shown["slog text"], shown["slog json"] = text.String(), js.String()

	hexed, decimals := fmt.Sprintf("%x", plain), strings.Trim(fmt.Sprint([]byte(plain)), "[]")
	for how, got := range shown {
		for _, form := range []string{plain, hexed, strings.ToUpper(hexed), decimals, plain[:8]} {
			if strings.Contains(got, form) {
				t.Errorf("%s shows the secret: %s", how, got)
			}
		}
	}
	if got := fmt.Sprintf("%v %d", v, v); got != Redacted+" "+Redacted {
		t.Errorf("got %q", got)
	}
}

func TestEqual(t *testing.T) {
	for _, c := range []struct {
		a, b Value
		want bool
	}{
		{New(plain), New(plain), true},
		{New(plain), New(plain + "x"), false},
		{New(plain), New(""), false},
		{New(""), Value{}, true},
		{Value{}, Value{}, true},
		{New("\x00"), New(""), false},
	} {
		if got := c.a.Equal(c.b); got != c.want {
			t.Errorf("Equal(%q, %q) = %v", c.a.Reveal(), c.b.Reveal(), got)
		}
	}
}
