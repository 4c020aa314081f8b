package kind

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"
)

func TestOf(t *testing.T) {
	plain := errors.New("plain")
	conflict := Errorf(Conflict, "busy: %w", fs.ErrExist)
	for _, c := range []struct {
		err  error
		want Kind
	}{
		{nil, Internal},
		{plain, Internal},
		{conflict, Conflict},
		{fmt.Errorf("outer %d: %w", 1, conflict), Conflict},
		{Wrap(NotFound, conflict), NotFound}, // the outermost counts
		{errors.Join(plain, conflict), Conflict},
		{Wrap(Denied, nil), Internal},
	} {
		if got := Of(c.err); got != c.want {
			t.Errorf("Of(%v) = %s, want %s", c.err, got, c.want)
		}
		if got := Is(c.err, c.want); got != (c.err != nil) {
			t.Errorf("Is(%v, %s) = %v", c.err, c.want, got)
		}
	}
	if Wrap(Denied, nil) != nil {
		t.Error("Wrap made an error of nil")
	}
	if !errors.Is(fmt.Errorf("x: %w", conflict), fs.ErrExist) {
		t.Error("the cause is lost")
	}
}

func TestFieldAndHint(t *testing.T) {
	inner := Errorf(Invalid, "%d is too much", 7).WithField("cpu").WithHint("at most %d", 5)
	if inner.Error() != "cpu: 7 is too much" {
		t.Errorf("text %q", inner)
	}
	outer := Wrap(Conflict, fmt.Errorf("create: %w", inner))
	if Field(outer) != "cpu" || Hint(outer) != "at most 5" {
		t.Errorf("field %q, hint %q", Field(outer), Hint(outer))
	}
	over := Errorf(Denied, "no: %w", outer).WithField("outer")
	if Field(over) != "outer" || Hint(over) != "at most 5" {
		t.Errorf("field %q, hint %q", Field(over), Hint(over))
	}
	for _, err := range []error{nil, errors.New("x"), Errorf(Invalid, "x")} {
		if Field(err) != "" || Hint(err) != "" {
			t.Errorf("%v: field %q, hint %q", err, Field(err), Hint(err))
		}
	}
}

func TestNames(t *testing.T) {
	seen := map[string]Kind{}
	for k := Internal; k <= Unavailable; k++ {
		if other, ok := seen[k.String()]; ok {
			t.Errorf("kinds %d and %d are both %q", k, other, k)
		}
		seen[k.String()] = k
	}
	if got := (Unavailable + 1).String(); got != "internal" {
		t.Errorf("a kind that is none is %q", got)
	}
}
