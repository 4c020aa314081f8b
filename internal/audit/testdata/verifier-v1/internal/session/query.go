package session

// IdempotencyKey makes a repeated create return the first one's session.
type IdempotencyKey struct {
	Scope  string // whose key it is (the API key's id)
	Key    string // the caller's text, at most MaxIdempotencyKey bytes; empty: none
	Digest string // of the request; the same key with another digest conflicts
}

// MaxIdempotencyKey bounds the caller's text of an IdempotencyKey.
const MaxIdempotencyKey = 255

// Filter narrows a list of sessions; zero fields do not narrow.
type Filter struct {
	States []State           // one of these
	Owner  string            // Principal.Subject of the owner
	Labels map[string]string // all of these
}
