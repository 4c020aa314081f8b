package api

import (
	"context"

	"bivy/internal/access"
	"bivy/internal/session"
)

// Route is what tests see of a route.
type Route struct {
	Method, Pattern            string
	Public, Developer, Auditor bool // who may use it, ownership aside
}

// Routes returns every route.
func Routes() []Route {
	var out []Route
	for _, r := range (&Handler{}).table() {
		may := func(role access.Role) bool {
			c := access.Caller{Principal: session.Principal{Subject: "x"}, Role: role}
			_, err := access.Roles{}.Decide(context.Background(), access.Request{Caller: c, Action: r.need})
			return r.public != "" || err == nil
		}
		out = append(out, Route{r.method, r.pattern, r.public != "", may(access.Developer), may(access.Auditor)})
	}
	return out
}
