package access

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"bivy/internal/audit"
	"bivy/internal/kind"
)

// Role is what an API key is for.
type Role string

// The roles.
const (
	Admin     Role = "admin"     // everything, on everyone's sessions
	Developer Role = "developer" // sessions of their own
	Auditor   Role = "auditor"   // reads everyone's records and changes nothing
)

// AllRoles lists every role.
func AllRoles() []Role { return []Role{Admin, Developer, Auditor} }

// ParseRole checks that s names a role. It fails with Invalid.
func ParseRole(s string) (Role, error) {
	if r := Role(s); slices.Contains(AllRoles(), r) {
		return r, nil
	}
	return "", kind.Errorf(kind.Invalid, "%.64q is not a role: want admin, developer or auditor", s).WithField("role")
}

// Action is one thing that a caller may do. An action that is not in the table
// is denied.
type Action string

// The actions. Those marked * are about a session, so that the rule of
// ownership applies.
const (
	SessionCreate Action = "session.create"
	SessionRead   Action = "session.read"   // * get, list, statistics
	SessionExtend Action = "session.extend" // * move the deadline
	SessionEnd    Action = "session.end"    // *
	CommandRun    Action = "command.run"    // * start, attach, input, signal
	CommandRead   Action = "command.read"   // * list
	FileRead      Action = "file.read"      // *
	FileWrite     Action = "file.write"     // *
	AuditRead     Action = "audit.read"     // * events, export, seal
	// AuditSystem is about the record of the node, which tells of everyone's
	// keys and sessions.
	AuditSystem  Action = "audit.system"
	TemplateRead Action = "template.read"
	// TemplateWrite is the admin's: a template name is shared by everyone, and
	// a caller who replaces one runs code in the sessions of others.
	TemplateWrite Action = "template.write"
	KeyManage     Action = "key.manage" // API keys, and the key that signs records
	NodeRead      Action = "node.read"  // health, versions and limits of the host
)

// Actions lists every action.
func Actions() []Action {
	return []Action{
		SessionCreate, SessionRead, SessionExtend, SessionEnd, CommandRun, CommandRead,
		FileRead, FileWrite, AuditRead, AuditSystem, TemplateRead, TemplateWrite, KeyManage, NodeRead,
	}
}

// reach says on whose sessions a role may use an action.
type reach uint8

const (
	never    reach = iota
	own            // on the caller's own sessions
	everyone       // on every session; also for what is about no session
)

func (r reach) String() string { return [...]string{"never", "own", "everyone"}[r] }

// reachOf is the whole table.
func reachOf(r Role, a Action) reach {
	switch r {
	case Admin:
		if slices.Contains(Actions(), a) {
			return everyone
		}
	case Developer:
		switch a {
		case SessionCreate, TemplateRead:
			return everyone
		case SessionRead, SessionExtend, SessionEnd, CommandRun, CommandRead, FileRead, FileWrite, AuditRead:
			return own
		case AuditSystem, TemplateWrite, KeyManage, NodeRead:
		}
	case Auditor:
		switch a {
		case SessionRead, CommandRead, AuditRead, AuditSystem, TemplateRead, NodeRead:
			return everyone
		case SessionCreate, SessionExtend, SessionEnd, CommandRun, FileRead, FileWrite, TemplateWrite, KeyManage:
			// Reading a file goes through the sandbox and leaves an event in
			// the record: it is not the auditor's.
		}
	}
	return never
}

// Roles is the Decider of API keys with roles: a fixed table of what each role
// may do, and the rule that developers see only sessions of their own. It is
// ready to use.
type Roles struct{}

var _ Decider = Roles{}

// rolesDigest names the table by its content.
var rolesDigest = func() string {
	var b strings.Builder
	for _, r := range AllRoles() {
		for _, a := range Actions() {
			fmt.Fprintf(&b, "%s %s %s\n", r, a, reachOf(r, a))
		}
	}
	sum := sha256.Sum256([]byte(b.String()))
	return "sha256:" + hex.EncodeToString(sum[:])
}()

// Decide implements Decider.
func (Roles) Decide(_ context.Context, r Request) (audit.Decision, error) {
	err := allow(r.Caller, r.Action)
	if err == nil && reachOf(r.Caller.Role, r.Action) == own && r.Resource.Session != "" && r.Resource.Owner.Subject != r.Caller.Principal.Subject {
		// A caller who may not see a session must not learn that it exists.
		err = kind.Errorf(kind.NotFound, "session %s does not exist", r.Resource.Session).WithField("session")
	}
	if err != nil {
		return audit.Decision{Verdict: audit.Deny, Policy: rolesDigest}, err
	}
	return audit.Decision{Verdict: audit.Allow, Policy: rolesDigest}, nil
}

// Scope implements Decider.
func (Roles) Scope(_ context.Context, c Caller, a Action) (owner string, err error) {
	if err := allow(c, a); err != nil {
		return "", err
	}
	if reachOf(c.Role, a) == own {
		return c.Principal.Subject, nil
	}
	return "", nil
}

// allow fails with Denied when c may not use a at all.
func allow(c Caller, a Action) error {
	if c.Principal.Subject != "" && reachOf(c.Role, a) != never {
		return nil
	}
	role := c.Role
	if role == "" {
		role = "none"
	}
	return kind.Errorf(kind.Denied, "role %s does not permit %s", role, a).
		WithHint("use a key whose role permits it; an admin can create one with bivy key create")
}
