package api

// Route is what tests see of a route.
type Route struct {
	Method, Pattern string
	Public          bool
}

// Routes returns every route.
func Routes() []Route {
	var out []Route
	for _, r := range table() {
		out = append(out, Route{r.method, r.pattern, r.public != ""})
	}
	return out
}

// DigestOf is the digest of a request with a key.
func DigestOf(key []byte, v any) (string, error) {
	return (&Handler{o: Options{DigestKey: key}}).digestOf(v)
}
