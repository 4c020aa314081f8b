package api_test

import (
	"net/http"
	"strings"
	"testing"

	"bivy/client"
	"bivy/internal/access"
	"bivy/internal/api"
	"bivy/internal/api/apitest"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// routes says of every route which action its handler asks a decision on, and
// with which request it is tried.
var routes = map[string]struct {
	action access.Action
	query  string
	typ    string
	body   string
}{
	"GET /v1/version":           {action: access.SessionRead},
	"GET /v1/node":              {action: access.NodeRead},
	"GET /v1/audit/key":         {action: access.AuditRead},
	"POST /v1/audit/key/rotate": {action: access.KeyManage, typ: jsonType, body: `{}`},
	"GET /v1/audit/system":      {action: access.AuditSystem},
	"GET /v1/audit/head":        {action: access.AuditSystem},
	"GET /v1/audit/listing":     {action: access.AuditSystem},

	"POST /v1/sessions":                   {action: access.SessionCreate, typ: jsonType, body: `{}`},
	"GET /v1/sessions":                    {action: access.SessionRead},
	"GET /v1/sessions/{session}":          {action: access.SessionRead},
	"DELETE /v1/sessions/{session}":       {action: access.SessionEnd},
	"POST /v1/sessions/{session}/timeout": {action: access.SessionExtend, typ: jsonType, body: `{"timeout_seconds":60}`},
	"GET /v1/sessions/{session}/stats":    {action: access.SessionRead},
	"GET /v1/sessions/{session}/events":   {action: access.AuditRead},
	"GET /v1/sessions/{session}/record":   {action: access.AuditRead},

	"POST /v1/sessions/{session}/commands":                       {action: access.CommandRun, typ: jsonType, body: `{"argv":["true"]}`},
	"GET /v1/sessions/{session}/commands":                        {action: access.CommandRead},
	"GET /v1/sessions/{session}/commands/{command}":              {action: access.CommandRun},
	"POST /v1/sessions/{session}/commands/{command}/stdin":       {action: access.CommandRun, typ: "application/octet-stream", body: "x"},
	"POST /v1/sessions/{session}/commands/{command}/stdin/close": {action: access.CommandRun},
	"POST /v1/sessions/{session}/commands/{command}/signal":      {action: access.CommandRun, typ: jsonType, body: `{"signal":15}`},
	"POST /v1/sessions/{session}/commands/{command}/resize":      {action: access.CommandRun, typ: jsonType, body: `{"cols":80,"rows":24}`},

	"GET /v1/sessions/{session}/files":    {action: access.FileRead, query: "?path=/x"},
	"PUT /v1/sessions/{session}/files":    {action: access.FileWrite, query: "?path=/x", typ: "application/octet-stream", body: "x"},
	"DELETE /v1/sessions/{session}/files": {action: access.FileWrite, query: "?path=/x"},
	"GET /v1/sessions/{session}/stat":     {action: access.FileRead, query: "?path=/x"},
	"GET /v1/sessions/{session}/dir":      {action: access.FileRead, query: "?path=/"},
	"POST /v1/sessions/{session}/mkdir":   {action: access.FileWrite, query: "?path=/d"},
	"POST /v1/sessions/{session}/move":    {action: access.FileWrite, query: "?path=/x&to=/y"},

	"GET /v1/templates":              {action: access.TemplateRead},
	"POST /v1/templates":             {action: access.TemplateWrite, typ: jsonType, body: `{"version":1,"from":{}}`},
	"GET /v1/templates/{name...}":    {action: access.TemplateRead},
	"DELETE /v1/templates/{name...}": {action: access.TemplateWrite},

	"GET /v1/keys":          {action: access.KeyManage},
	"POST /v1/keys":         {action: access.KeyManage, typ: jsonType, body: `{"role":"auditor"}`},
	"DELETE /v1/keys/{key}": {action: access.KeyManage},
}

const jsonType = "application/json"

// TestEveryRouteDecides walks every route, through the parts that do the work,
// with no key and with a key of each role, on sessions of the caller and of
// another: the answer is what the table of access.Roles says.
func TestEveryRouteDecides(t *testing.T) {
	s := serve(t)
	tokens := map[access.Role]string{access.Admin: apitest.AdminSecret, access.Developer: apitest.DeveloperSecret, access.Auditor: apitest.AuditorSecret}
	owners := []access.Role{access.Admin, access.Developer}
	create := func(owner access.Role) string {
		sess, err := s.as(t, tokens[owner]).CreateSession(t.Context(), client.CreateSession{})
		if err != nil {
			t.Fatal(err)
		}
		return sess.ID
	}
	sessions := map[access.Role]string{}
	for _, owner := range owners {
		sessions[owner] = create(owner)
	}
	known := map[string]bool{}
	for _, r := range api.Routes() {
		name := r.Method + " " + r.Pattern
		known[name] = true
		try, ok := routes[name]
		if r.Public {
			if ok || strings.Contains(r.Pattern, "{") {
				t.Errorf("%s is public, and is about something in particular or decided on", name)
			}
			continue
		}
		if !ok {
			t.Errorf("%s is not tried by this test", name)
			continue
		}
		below := strings.Contains(r.Pattern, "{session}")
		for _, owner := range owners {
			id, resource := "", access.Resource{}
			if below {
				id = sessions[owner]
				if try.action == access.SessionEnd {
					id = create(owner) // the others are still needed
				}
				resource = access.Resource{Session: session.ID(id), Owner: session.Principal{Subject: "key:" + string(owner)}}
			}
			path := strings.NewReplacer("{session}", id, "{command}", "x", "{name...}", "nothing", "{key}", "zz").Replace(r.Pattern) + try.query
			ask := func(token string) (int, client.Error) {
				status, e, _ := s.raw(t, r.Method, path, try.typ, try.body, "Authorization", "Bearer "+token, "Accept", "*/*")
				return status, e
			}
			if status, _ := ask(""); status != http.StatusUnauthorized {
				t.Errorf("%s without a key: %d", name, status)
			}
			// The admin comes last: it may do what the others must not have done.
			for _, role := range []access.Role{access.Auditor, access.Developer, access.Admin} {
				caller := access.Caller{Principal: session.Principal{Subject: "key:" + string(role)}, Role: role}
				_, want := access.Roles{}.Decide(t.Context(), access.Request{Caller: caller, Action: try.action, Resource: resource})
				status, e := ask(tokens[role])
				hidden := status == http.StatusNotFound && id != "" && strings.Contains(e.Message, "session "+id+" does not exist")
				switch {
				case want == nil && (status == http.StatusUnauthorized || status == http.StatusForbidden || hidden || status >= 500):
					t.Errorf("%s on a session of %s's as %s: %d %s; want it allowed", name, owner, role, status, e.Message)
				case kind.Is(want, kind.Denied) && status != http.StatusForbidden:
					t.Errorf("%s on a session of %s's as %s: %d %s; want it denied", name, owner, role, status, e.Message)
				case kind.Is(want, kind.NotFound) && !hidden:
					t.Errorf("%s on a session of %s's as %s: %d %s; want it not found", name, owner, role, status, e.Message)
				}
			}
			if !below {
				break
			}
		}
	}
	for name := range routes {
		if !known[name] {
			t.Errorf("%s is tried, and there is no such route", name)
		}
	}
}

// TestFollowDecidesFirst: the answer to a caller who may not follow a record is
// an error, not the beginning of a stream.
func TestFollowDecidesFirst(t *testing.T) {
	s := serve(t)
	sess := s.session(t)
	status, e, _ := s.raw(t, "GET", "/v1/sessions/"+sess.ID+"/events?follow=true", "", "", "Authorization", "Bearer "+apitest.DeveloperSecret)
	if status != http.StatusNotFound || e.Code != client.CodeNotFound {
		t.Errorf("%d %+v", status, e)
	}
}

func TestListsAreScoped(t *testing.T) {
	s := serve(t)
	s.session(t)
	dev := s.as(t, apitest.DeveloperSecret)
	own, err := dev.CreateSession(t.Context(), client.CreateSession{})
	if err != nil {
		t.Fatal(err)
	}
	for c, want := range map[*client.Client]int{dev: 1, s.Client: 2, s.as(t, apitest.AuditorSecret): 2} {
		n := 0
		for info, err := range c.Sessions(t.Context(), client.ListOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			if want == 1 && info.ID != own.ID {
				t.Errorf("a developer is shown %s", info.ID)
			}
			n++
		}
		if n != want {
			t.Errorf("%d sessions listed, want %d", n, want)
		}
	}
	for range dev.Sessions(t.Context(), client.ListOptions{Owner: "key:admin"}) {
		t.Error("a developer is shown an admin's session")
	}
}
