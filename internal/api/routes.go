package api

import (
	"strings"
)

// roles is a set of roles.
type roles uint8

const (
	public    roles = 0
	admin     roles = 1 << 0
	developer roles = 1 << 1
	auditor   roles = 1 << 2
)

func (r roles) has(role Role) bool {
	switch role {
	case Admin:
		return r&admin != 0
	case Developer:
		return r&developer != 0
	case Auditor:
		return r&auditor != 0
	}
	return false
}

func (r roles) String() string {
	var names []string
	for _, role := range []Role{Admin, Developer, Auditor} {
		if r.has(role) {
			names = append(names, string(role))
		}
	}
	return strings.Join(names, " or ")
}

// scope says whether a route is below a session, whose owner then matters.
type scope uint8

const (
	none  scope = iota // not below a session
	owned              // a developer's key must own the session
)

// route is one way into the server. A route without a reason for public has
// roles; a test walks the table.
type route struct {
	method, pattern string
	roles           roles
	session         scope
	query           []string // known parameters; those with a star may be repeated
	repeatable      bool     // takes an idempotency key
	why             string   // a public route's reason to be so
	handle          func(*call) error
}

// table is every route there is.
func (h *Handler) table() []route {
	const (
		use  = admin | developer           // changes a session or sees into it
		read = admin | developer | auditor // sees what is known of it
		s    = "/v1/sessions/{session}"
		cmd  = s + "/commands/{command}"
	)
	file := []string{"path", "user"}
	return []route{
		{method: "GET", pattern: "/v1/health", why: "load balancers have no key, and it tells nothing", handle: health},
		{method: "GET", pattern: "/v1/openapi.yaml", why: "it describes the interface, not this server", handle: openAPI},
		{method: "GET", pattern: "/v1/version", roles: read, handle: version},
		{method: "GET", pattern: "/v1/node", roles: admin | auditor, handle: node},
		{method: "GET", pattern: "/v1/audit/key", roles: read, handle: auditKey},

		{method: "POST", pattern: "/v1/sessions", roles: use, repeatable: true, handle: createSession},
		{method: "GET", pattern: "/v1/sessions", roles: read, query: []string{"state*", "label*", "owner", "cursor", "limit"}, handle: listSessions},
		{method: "GET", pattern: s, roles: read, session: owned, handle: getSession},
		{method: "DELETE", pattern: s, roles: use, session: owned, handle: endSession},
		{method: "POST", pattern: s + "/timeout", roles: use, session: owned, handle: setTimeout},
		{method: "GET", pattern: s + "/stats", roles: read, session: owned, handle: stats},
		{method: "GET", pattern: s + "/events", roles: read, session: owned, query: []string{"after", "limit", "follow"}, handle: events},
		{method: "GET", pattern: s + "/record", roles: read, session: owned, handle: record},

		{method: "POST", pattern: s + "/commands", roles: use, session: owned, handle: startCommand},
		{method: "GET", pattern: s + "/commands", roles: use, session: owned, handle: listCommands},
		{method: "GET", pattern: cmd, roles: use, session: owned, handle: attachCommand},
		{method: "POST", pattern: cmd + "/stdin", roles: use, session: owned, handle: commandStdin},
		{method: "POST", pattern: cmd + "/stdin/close", roles: use, session: owned, handle: commandCloseStdin},
		{method: "POST", pattern: cmd + "/signal", roles: use, session: owned, handle: commandSignal},
		{method: "POST", pattern: cmd + "/resize", roles: use, session: owned, handle: commandResize},

		{method: "GET", pattern: s + "/files", roles: use, session: owned, query: file, handle: readFile},
		{method: "PUT", pattern: s + "/files", roles: use, session: owned, query: append([]string{"mode"}, file...), handle: writeFile},
		{method: "DELETE", pattern: s + "/files", roles: use, session: owned, query: file, handle: removeFile},
		{method: "GET", pattern: s + "/stat", roles: use, session: owned, query: file, handle: statFile},
		{method: "GET", pattern: s + "/dir", roles: use, session: owned, query: append([]string{"depth"}, file...), handle: listDir},
		{method: "POST", pattern: s + "/mkdir", roles: use, session: owned, query: file, handle: makeDir},
		{method: "POST", pattern: s + "/move", roles: use, session: owned, query: append([]string{"to"}, file...), handle: moveFile},

		{method: "GET", pattern: "/v1/templates", roles: read, handle: listTemplates},
		{method: "POST", pattern: "/v1/templates", roles: admin, repeatable: true, handle: buildTemplate},
		{method: "GET", pattern: "/v1/templates/{name...}", roles: read, handle: getTemplate},
		{method: "DELETE", pattern: "/v1/templates/{name...}", roles: admin, handle: removeTemplate},

		{method: "GET", pattern: "/v1/keys", roles: admin, handle: listKeys},
		{method: "POST", pattern: "/v1/keys", roles: admin, repeatable: true, handle: createKey},
		{method: "DELETE", pattern: "/v1/keys/{key}", roles: admin, handle: revokeKey},
	}
}
