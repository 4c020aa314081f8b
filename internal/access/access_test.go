package access

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// decide asks Roles and checks that verdict and error agree.
func decide(t *testing.T, c Caller, a Action, r Resource) error {
	t.Helper()
	d, err := Roles{}.Decide(t.Context(), Request{Caller: c, Action: a, Resource: r})
	want := audit.Decision{Verdict: audit.Allow, Policy: rolesDigest}
	if err != nil {
		want.Verdict = audit.Deny
	}
	if d != want || !strings.HasPrefix(d.Policy, "sha256:") {
		t.Errorf("%+v %s: decision %+v with error %v", c, a, d, err)
	}
	return err
}

// TestTable holds the whole table of permissions: a change of it is a change
// of this test.
func TestTable(t *testing.T) {
	type row struct{ admin, developer, auditor string }
	want := map[Action]row{
		SessionCreate: {"all", "all", "-"},
		SessionRead:   {"all", "own", "all"},
		SessionExtend: {"all", "own", "-"},
		SessionEnd:    {"all", "own", "-"},
		CommandRun:    {"all", "own", "-"},
		CommandRead:   {"all", "own", "all"},
		FileRead:      {"all", "own", "-"},
		FileWrite:     {"all", "own", "-"},
		AuditRead:     {"all", "own", "all"},
		TemplateRead:  {"all", "all", "all"},
		TemplateWrite: {"all", "-", "-"},
		KeyManage:     {"all", "-", "-"},
		NodeRead:      {"all", "-", "all"},
		AuditSystem:   {"all", "-", "all"},
	}
	id := session.NewID()
	name := func(role Role, p Action) string {
		c := Caller{Principal: session.Principal{Subject: "key:me"}, Role: role}
		mine := decide(t, c, p, Resource{Session: id, Owner: c.Principal})
		theirs := decide(t, c, p, Resource{Session: id, Owner: session.Principal{Subject: "key:other"}})
		scope, scopeErr := Roles{}.Scope(t.Context(), c, p)
		switch {
		case mine == nil && theirs == nil:
			if scope != "" || scopeErr != nil || decide(t, c, p, Resource{}) != nil {
				t.Errorf("%s %s: scope %q %v", role, p, scope, scopeErr)
			}
			return "all"
		case mine == nil:
			if scope != "key:me" || scopeErr != nil || decide(t, c, p, Resource{}) != nil {
				t.Errorf("%s %s: scope %q %v", role, p, scope, scopeErr)
			}
			if !kind.Is(theirs, kind.NotFound) {
				t.Errorf("%s %s on somebody else's session: %v, want as if it were not there", role, p, theirs)
			}
			return "own"
		}
		if !kind.Is(mine, kind.Denied) || !kind.Is(theirs, kind.Denied) || !kind.Is(scopeErr, kind.Denied) || !kind.Is(decide(t, c, p, Resource{}), kind.Denied) {
			t.Errorf("%s %s: %v, %v, %v", role, p, mine, theirs, scopeErr)
		}
		return "-"
	}
	got := map[Action]row{}
	for _, p := range Actions() {
		got[p] = row{name(Admin, p), name(Developer, p), name(Auditor, p)}
	}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(row{})); d != "" {
		t.Errorf("table (-want +got):\n%s", d)
	}
}

func TestNobodyMayDoAnything(t *testing.T) {
	id := session.NewID()
	for _, c := range []Caller{
		{}, {Role: Admin}, {Principal: session.Principal{Subject: "key:x"}}, {Principal: session.Principal{Subject: "key:x"}, Role: "root"},
	} {
		for _, p := range Actions() {
			if decide(t, c, p, Resource{}) == nil || decide(t, c, p, Resource{Session: id}) == nil {
				t.Errorf("%+v may %s", c, p)
			}
		}
	}
	for _, role := range AllRoles() {
		c := Caller{Principal: session.Principal{Subject: "key:x"}, Role: role}
		for _, p := range []Action{"", "session", "session.*", "SESSION.READ", "new.permission"} {
			if decide(t, c, p, Resource{}) == nil {
				t.Errorf("%s may %q", role, p)
			}
		}
		if got, err := ParseRole(string(role)); got != role || err != nil {
			t.Errorf("ParseRole(%s): %v, %v", role, got, err)
		}
	}
}
