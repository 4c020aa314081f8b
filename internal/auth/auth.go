// Package auth says who is calling and what they may do: API keys, roles and
// one closed table of permissions.
package auth

import (
	"slices"

	"bivy/internal/kind"
	"bivy/internal/session"
)

// Role is what a key is for.
type Role string

// The roles.
const (
	Admin     Role = "admin"     // everything, on everyone's sessions
	Developer Role = "developer" // sessions of their own
	Auditor   Role = "auditor"   // reads everyone's records and changes nothing
)

// Roles lists every role.
func Roles() []Role { return []Role{Admin, Developer, Auditor} }

// ParseRole checks that s names a role.
func ParseRole(s string) (Role, error) {
	if r := Role(s); slices.Contains(Roles(), r) {
		return r, nil
	}
	return "", kind.Errorf(kind.Invalid, "%.64q is not a role: want admin, developer or auditor", s).WithField("role")
}

// Permission is one thing that a caller may do. Every entrance names the
// permission it needs; what is not in the table below nobody may do.
type Permission string

// The permissions. Those marked * are about a session and go through
// AllowSession, which applies the rule of ownership.
const (
	SessionCreate Permission = "session.create"
	SessionRead   Permission = "session.read"   // * get, list, statistics
	SessionExtend Permission = "session.extend" // * move the deadline
	SessionEnd    Permission = "session.end"    // *
	CommandRun    Permission = "command.run"    // * start, attach, input, signal
	CommandRead   Permission = "command.read"   // * list
	FileRead      Permission = "file.read"      // *
	FileWrite     Permission = "file.write"     // *
	AuditRead     Permission = "audit.read"     // * events, export, seal
	TemplateRead  Permission = "template.read"
	// TemplateWrite is the admin's: a template name is shared by everyone, and
	// whoever replaces one runs code in the sessions of others.
	TemplateWrite Permission = "template.write"
	KeyManage     Permission = "key.manage"
	NodeRead      Permission = "node.read" // health, versions and limits of the host
)

// Permissions lists every permission.
func Permissions() []Permission {
	return []Permission{
		SessionCreate, SessionRead, SessionExtend, SessionEnd, CommandRun, CommandRead,
		FileRead, FileWrite, AuditRead, TemplateRead, TemplateWrite, KeyManage, NodeRead,
	}
}

// reach says on whose sessions a role may use a permission.
type reach uint8

const (
	never    reach = iota
	own            // on the caller's own sessions
	everyone       // on every session; also for what is about no session
)

// reachOf is the whole table.
func reachOf(r Role, p Permission) reach {
	switch r {
	case Admin:
		if slices.Contains(Permissions(), p) {
			return everyone
		}
	case Developer:
		switch p {
		case SessionCreate, TemplateRead:
			return everyone
		case SessionRead, SessionExtend, SessionEnd, CommandRun, CommandRead, FileRead, FileWrite, AuditRead:
			return own
		case TemplateWrite, KeyManage, NodeRead:
		}
	case Auditor:
		switch p {
		case SessionRead, CommandRead, AuditRead, TemplateRead, NodeRead:
			return everyone
		case SessionCreate, SessionExtend, SessionEnd, CommandRun, FileRead, FileWrite, TemplateWrite, KeyManage:
			// Reading a file goes through the sandbox and leaves an event in
			// the record: it is not the auditor's.
		}
	}
	return never
}

// Caller is an authenticated principal. The zero Caller may do nothing.
type Caller struct {
	Principal session.Principal
	Role      Role
}

// Allow reports with Denied that c may not use p at all. For a permission
// about a session it is only the first half of the answer: AllowSession is the
// whole, and for lists Scope.
func (c Caller) Allow(p Permission) error {
	if c.Principal.Subject == "" || reachOf(c.Role, p) == never {
		role := c.Role
		if role == "" {
			role = "none"
		}
		return kind.Errorf(kind.Denied, "role %s does not permit %s", role, p).
			WithHint("use a key whose role permits it; an admin can create one with bivy key create")
	}
	return nil
}

// AllowSession reports whether c may use p on session id, which is owner's.
// It fails with Denied when the role never permits it, and with NotFound, as
// if the session were not there, when the session is somebody else's.
func (c Caller) AllowSession(p Permission, id session.ID, owner session.Principal) error {
	if err := c.Allow(p); err != nil {
		return err
	}
	if reachOf(c.Role, p) == own && owner.Subject != c.Principal.Subject {
		return kind.Errorf(kind.NotFound, "session %s does not exist", id).WithField("session")
	}
	return nil
}

// Scope narrows a list to what c may use p on: "" for everything, else the
// subject whose sessions the list must be limited to.
func (c Caller) Scope(p Permission) (owner string, err error) {
	if err := c.Allow(p); err != nil {
		return "", err
	}
	if reachOf(c.Role, p) == own {
		return c.Principal.Subject, nil
	}
	return "", nil
}
