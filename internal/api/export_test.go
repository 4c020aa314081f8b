package api

import (
	"bivy/internal/auth"
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
		may := func(role auth.Role) bool {
			c := auth.Caller{Principal: session.Principal{Subject: "x"}, Role: role}
			return r.public != "" || c.Allow(r.need) == nil
		}
		out = append(out, Route{r.method, r.pattern, r.public != "", may(auth.Developer), may(auth.Auditor)})
	}
	return out
}
