package catalog

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/template"
)

// events is a Record in memory; fail makes its writes fail.
type events struct {
	all  []audit.Entry
	fail error
}

func (e *events) Begin(_ context.Context, in audit.Entry) (func(audit.Entry) error, error) {
	if e.fail != nil {
		return nil, e.fail
	}
	e.all = append(e.all, in)
	return func(out audit.Entry) error {
		if out.Object == "" {
			out.Object = in.Object
		}
		out.Actor = in.Actor
		e.all = append(e.all, out)
		return nil
	}, nil
}

func (e *events) actions() []string {
	var out []string
	for _, x := range e.all {
		out = append(out, string(x.Action)+" by "+x.Actor.Subject)
	}
	return out
}

var (
	admin   = access.Caller{Principal: session.Principal{Subject: "key:admin"}, Role: access.Admin}
	auditor = access.Caller{Principal: session.Principal{Subject: "key:auditor"}, Role: access.Auditor}
)

func open(t *testing.T) (*Service, *template.Store, *events) {
	t.Helper()
	s, err := template.Open(filepath.Join(t.TempDir(), "templates"), template.Options{Grace: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	e := &events{}
	return New(s, e, access.Roles{}), s, e
}

// spec is a template whose image has one file with a content.
func spec(t *testing.T, name, content string) template.Spec {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return template.Spec{Version: 1, Name: name, From: template.From{Directory: &template.Directory{Path: dir}}}
}

func TestChangesAreRecorded(t *testing.T) {
	s, _, e := open(t)
	first, err := s.Build(t.Context(), admin, spec(t, "tool", "one"), nil)
	if err != nil {
		t.Fatal(err)
	}
	second, err := s.Build(t.Context(), admin, spec(t, "tool", "two"), nil)
	if err != nil {
		t.Fatal(err)
	}
	missing := template.Spec{Version: 1, From: template.From{Directory: &template.Directory{Path: "/no/such/directory"}}}
	if _, err := s.Build(t.Context(), admin, missing, nil); err == nil {
		t.Error("a directory that is not there was built")
	}
	if err := s.Remove(t.Context(), admin, "tool"); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), admin, "tool"); !kind.Is(err, kind.NotFound) {
		t.Errorf("removed twice: %v", err)
	}
	gone, err := s.Collect(t.Context())
	if err != nil || len(gone.Digests) != 2 {
		t.Errorf("collected %+v, %v", gone, err)
	}
	if _, err := s.Collect(t.Context()); err != nil {
		t.Error(err)
	}
	want := []string{
		"template.build.intent by key:admin", "template.built by key:admin",
		"template.build.intent by key:admin", "template.built by key:admin",
		"template.build.intent by key:admin", "template.failed by key:admin",
		"template.remove.intent by key:admin", "template.removed by key:admin",
		"template.remove.intent by ", "template.removed by ", // by the node
	}
	if d := cmp.Diff(want, e.actions()); d != "" {
		t.Fatalf("events (-want +got):\n%s", d)
	}
	if p := e.all[1].Payload.(builtPayload); p.Replaced != "" || p.Digest != first.Digest {
		t.Errorf("first build: %+v", p)
	}
	if p := e.all[3].Payload.(builtPayload); p.Replaced != first.Digest || p.Digest != second.Digest || e.all[3].Object != "template/"+string(second.Digest) {
		t.Errorf("second build: %+v about %s", p, e.all[3].Object)
	}
	if b, err := json.Marshal(e.all[9].Payload); err != nil || e.all[9].Object != "templates/unused" || len(b) < 2*64 {
		t.Errorf("collected: %s about %s, %v", b, e.all[9].Object, err)
	}
	for _, x := range e.all {
		if x.Action.Intent() && (x.Ref == "" || x.Actor == admin.Principal && x.Decision.Verdict != audit.Allow) {
			t.Errorf("%s: ref %q, decision %+v", x.Action, x.Ref, x.Decision)
		}
	}
}

// TestNoRecordNoChange: what cannot be recorded is not done.
func TestNoRecordNoChange(t *testing.T) {
	s, store, e := open(t)
	if _, err := s.Build(t.Context(), admin, spec(t, "tool", "one"), nil); err != nil {
		t.Fatal(err)
	}
	e.fail = errors.New("disk full")
	if _, err := s.Build(t.Context(), admin, spec(t, "other", "two"), nil); err == nil {
		t.Error("built without a record")
	}
	if err := s.Remove(t.Context(), admin, "tool"); err == nil {
		t.Error("removed without a record")
	}
	if list, err := store.List(); err != nil || len(list) != 1 || len(list[0].Names) != 1 {
		t.Errorf("templates %+v, %v", list, err)
	}
	if err := store.Remove("tool"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Collect(t.Context()); err == nil {
		t.Error("collected without a record")
	}
	if list, err := store.List(); err != nil || len(list) != 1 {
		t.Errorf("templates %+v, %v", list, err)
	}
}

func TestRolesDecide(t *testing.T) {
	s, store, e := open(t)
	if _, err := s.Build(t.Context(), admin, spec(t, "tool", "one"), nil); err != nil {
		t.Fatal(err)
	}
	before := len(e.all)
	if _, err := s.Build(t.Context(), auditor, spec(t, "tool", "two"), nil); !kind.Is(err, kind.Denied) {
		t.Errorf("an auditor builds: %v", err)
	}
	for _, name := range []string{"tool", "nothing"} { // which of them exists is not told
		if err := s.Remove(t.Context(), auditor, name); !kind.Is(err, kind.Denied) {
			t.Errorf("an auditor removes %s: %v", name, err)
		}
		if _, err := s.Get(t.Context(), access.Caller{}, name); !kind.Is(err, kind.Denied) {
			t.Errorf("a caller without a role reads %s: %v", name, err)
		}
	}
	if _, err := s.List(t.Context(), access.Caller{}); !kind.Is(err, kind.Denied) {
		t.Errorf("a caller without a role lists: %v", err)
	}
	if l, err := s.Get(t.Context(), auditor, "tool"); err != nil || len(l.Names) != 1 {
		t.Errorf("an auditor reads: %+v, %v", l, err)
	}
	if list, err := store.List(); err != nil || len(list) != 1 || len(e.all) != before {
		t.Errorf("templates %+v, %v, events %v", list, err, e.actions())
	}
}
