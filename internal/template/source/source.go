package source

import (
	"context"

	"bivy/internal/template/tree"
)

// Defaults are the defaults of processes that a source contains.
type Defaults struct {
	Env     map[string]string
	User    string
	Workdir string
	Cmd     []string
}

// Progress is called with the number of bytes read and their total, or 0 when the
// total is not known.
type Progress func(done, total int64)

// Source is one input of an image. The order of calls is Key, Load, Close; Key
// and Load at most once each. Contents that Load put into the tree may be read
// until Close.
type Source interface {
	// Key identifies the content without reading all of it: two sources with
	// the same key give the same tree. It is empty when that is not possible.
	// Errors have a kind: NotFound, Invalid, Denied, Unavailable, Exhausted.
	Key(ctx context.Context) (string, error)

	// Load merges the files into t and returns the defaults. Contents that are
	// not files of this host are stored in spool.
	Load(ctx context.Context, t *tree.Tree, spool *tree.Spool, progress Progress) (Defaults, error)

	// String describes the source for people. It contains no secret.
	String() string

	// Close releases what Load opened. It may be called more than once.
	Close() error
}
