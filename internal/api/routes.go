package api

// route is a method and a path pattern. A route that is not public needs an API
// key; what the caller may do is decided by the part that the handler calls.
type route struct {
	method, pattern string
	public          string   // why no key is needed; empty: one is
	query           []string // known parameters; those with a star may be repeated
	repeatable      bool     // takes an idempotency key
	handle          func(*call) error
}

// table is every route there is.
func table() []route {
	const (
		s   = "/v1/sessions/{session}"
		cmd = s + "/commands/{command}"
	)
	file := []string{"path", "user"}
	return []route{
		{method: "GET", pattern: "/v1/health", public: "load balancers have no key, and it says only whether the server takes work", handle: health},
		{method: "GET", pattern: "/v1/openapi.yaml", public: "it describes the interface, not this server", handle: openAPI},
		{method: "GET", pattern: "/v1/version", handle: version},
		{method: "GET", pattern: "/v1/node", handle: node},

		{method: "GET", pattern: "/v1/audit/key", handle: auditKey},
		{method: "POST", pattern: "/v1/audit/key/rotate", handle: rotateAuditKey},
		{method: "GET", pattern: "/v1/audit/system", handle: systemRecord},
		{method: "GET", pattern: "/v1/audit/head", handle: auditHead},
		{method: "GET", pattern: "/v1/audit/listing", handle: recordListing},

		{method: "POST", pattern: "/v1/sessions", repeatable: true, handle: createSession},
		{method: "GET", pattern: "/v1/sessions", query: []string{"state*", "label*", "owner", "cursor", "limit"}, handle: listSessions},
		{method: "GET", pattern: s, handle: getSession},
		{method: "DELETE", pattern: s, handle: endSession},
		{method: "POST", pattern: s + "/timeout", handle: setTimeout},
		{method: "GET", pattern: s + "/stats", handle: stats},
		{method: "GET", pattern: s + "/events", query: []string{"after", "limit", "follow"}, handle: events},
		{method: "GET", pattern: s + "/record", handle: record},

		{method: "POST", pattern: s + "/commands", handle: startCommand},
		{method: "GET", pattern: s + "/commands", handle: listCommands},
		{method: "GET", pattern: cmd, handle: attachCommand},
		{method: "POST", pattern: cmd + "/stdin", handle: commandStdin},
		{method: "POST", pattern: cmd + "/stdin/close", handle: commandCloseStdin},
		{method: "POST", pattern: cmd + "/signal", handle: commandSignal},
		{method: "POST", pattern: cmd + "/resize", handle: commandResize},

		{method: "GET", pattern: s + "/files", query: file, handle: readFile},
		{method: "PUT", pattern: s + "/files", query: file, handle: writeFile},
		{method: "DELETE", pattern: s + "/files", query: file, handle: removeFile},
		{method: "GET", pattern: s + "/stat", query: file, handle: statFile},
		{method: "GET", pattern: s + "/dir", query: append([]string{"depth"}, file...), handle: listDir},
		{method: "POST", pattern: s + "/mkdir", query: file, handle: makeDir},
		{method: "POST", pattern: s + "/move", query: append([]string{"to"}, file...), handle: moveFile},

		{method: "GET", pattern: "/v1/templates", handle: listTemplates},
		{method: "POST", pattern: "/v1/templates", handle: buildTemplate},
		{method: "GET", pattern: "/v1/templates/{name...}", handle: getTemplate},
		{method: "DELETE", pattern: "/v1/templates/{name...}", handle: removeTemplate},

		{method: "GET", pattern: "/v1/keys", handle: listKeys},
		{method: "POST", pattern: "/v1/keys", handle: createKey},
		{method: "DELETE", pattern: "/v1/keys/{key}", handle: revokeKey},
	}
}
