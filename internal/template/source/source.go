package source

import (
	"context"

	"bivy/internal/template/tree"
)

// Defaults is what a source says its processes start with.
type Defaults struct {
	Env     map[string]string
	User    string
	Workdir string
	Cmd     []string
}

// Progress is told how many of how many bytes were read; total is 0 when it is
// not known.
type Progress func(done, total int64)

// Source is one input of an image. The order of calls is Key, Load, Close; Key
// and Load at most once each. Contents that Load put into the tree may be read
// until Close.
type Source interface {
	// Key identifies what Load would read, at the cost of a look: two sources
	// with the same key give the same tree. It is empty when only reading
	// everything would tell.
	Key(ctx context.Context) (string, error)

	// Load merges the files into t; contents that are not files of this host
	// already go to spool.
	Load(ctx context.Context, t *tree.Tree, spool *tree.Spool, progress Progress) (Defaults, error)

	// String names the source for people; it holds no secret.
	String() string

	// Close releases what Load opened. It may be called more than once.
	Close() error
}
