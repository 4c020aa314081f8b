package api

import (
	"bivy/internal/access"
)

// route is one way into the server. It names the permission it takes or says
// why it is public; a test walks the table.
type route struct {
	method, pattern string
	need            access.Action
	public          string   // why a route without need is open to everyone
	query           []string // known parameters; those with a star may be repeated
	repeatable      bool     // takes an idempotency key
	handle          func(*call) error
}

// table is every route there is. Those below a session also go through the
// rule of ownership.
func (h *Handler) table() []route {
	const (
		s   = "/v1/sessions/{session}"
		cmd = s + "/commands/{command}"
	)
	file := []string{"path", "user"}
	return []route{
		{method: "GET", pattern: "/v1/health", public: "load balancers have no key, and it tells nothing", handle: health},
		{method: "GET", pattern: "/v1/openapi.yaml", public: "it describes the interface, not this server", handle: openAPI},
		{method: "GET", pattern: "/v1/version", need: access.SessionRead, handle: version},
		{method: "GET", pattern: "/v1/node", need: access.NodeRead, handle: node},
		{method: "GET", pattern: "/v1/audit/key", need: access.AuditRead, handle: auditKey},

		{method: "POST", pattern: "/v1/sessions", need: access.SessionCreate, repeatable: true, handle: createSession},
		{method: "GET", pattern: "/v1/sessions", need: access.SessionRead, query: []string{"state*", "label*", "owner", "cursor", "limit"}, handle: listSessions},
		{method: "GET", pattern: s, need: access.SessionRead, handle: getSession},
		{method: "DELETE", pattern: s, need: access.SessionEnd, handle: endSession},
		{method: "POST", pattern: s + "/timeout", need: access.SessionExtend, handle: setTimeout},
		{method: "GET", pattern: s + "/stats", need: access.SessionRead, handle: stats},
		{method: "GET", pattern: s + "/events", need: access.AuditRead, query: []string{"after", "limit", "follow"}, handle: events},
		{method: "GET", pattern: s + "/record", need: access.AuditRead, handle: record},

		{method: "POST", pattern: s + "/commands", need: access.CommandRun, handle: startCommand},
		{method: "GET", pattern: s + "/commands", need: access.CommandRead, handle: listCommands},
		{method: "GET", pattern: cmd, need: access.CommandRun, handle: attachCommand},
		{method: "POST", pattern: cmd + "/stdin", need: access.CommandRun, handle: commandStdin},
		{method: "POST", pattern: cmd + "/stdin/close", need: access.CommandRun, handle: commandCloseStdin},
		{method: "POST", pattern: cmd + "/signal", need: access.CommandRun, handle: commandSignal},
		{method: "POST", pattern: cmd + "/resize", need: access.CommandRun, handle: commandResize},

		{method: "GET", pattern: s + "/files", need: access.FileRead, query: file, handle: readFile},
		{method: "PUT", pattern: s + "/files", need: access.FileWrite, query: file, handle: writeFile},
		{method: "DELETE", pattern: s + "/files", need: access.FileWrite, query: file, handle: removeFile},
		{method: "GET", pattern: s + "/stat", need: access.FileRead, query: file, handle: statFile},
		{method: "GET", pattern: s + "/dir", need: access.FileRead, query: append([]string{"depth"}, file...), handle: listDir},
		{method: "POST", pattern: s + "/mkdir", need: access.FileWrite, query: file, handle: makeDir},
		{method: "POST", pattern: s + "/move", need: access.FileWrite, query: append([]string{"to"}, file...), handle: moveFile},

		{method: "GET", pattern: "/v1/templates", need: access.TemplateRead, handle: listTemplates},
		{method: "POST", pattern: "/v1/templates", need: access.TemplateWrite, handle: buildTemplate},
		{method: "GET", pattern: "/v1/templates/{name...}", need: access.TemplateRead, handle: getTemplate},
		{method: "DELETE", pattern: "/v1/templates/{name...}", need: access.TemplateWrite, handle: removeTemplate},

		{method: "GET", pattern: "/v1/keys", need: access.KeyManage, handle: listKeys},
		{method: "POST", pattern: "/v1/keys", need: access.KeyManage, handle: createKey},
		{method: "DELETE", pattern: "/v1/keys/{key}", need: access.KeyManage, handle: revokeKey},
	}
}
