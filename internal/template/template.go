package template

import (
	"regexp"
	"strings"
	"time"

	"bivy/internal/kind"
)

// Digest names a template or an image by content: "sha256:" and 64 hex digits.
type Digest string

var digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// shortDigest matches a digest or a beginning of at least 12 digits. Names of this
// form are refused.
var shortDigest = regexp.MustCompile(`^sha256:[0-9a-f]{12,64}$`)

// parseDigest checks the form of a digest.
func parseDigest(s string) (Digest, error) {
	if !digestForm.MatchString(s) {
		return "", kind.Errorf(kind.Invalid, "invalid digest %.100q: want sha256: and 64 hex digits", s)
	}
	return Digest(s), nil
}

// Hex returns the hex digits only, which are used in file names.
func (d Digest) Hex() string { return strings.TrimPrefix(string(d), "sha256:") }

// Config holds the defaults of a template's processes.
type Config struct {
	Env     map[string]string `json:"env,omitempty"`
	User    string            `json:"user,omitempty"` // name or uid, with an optional ":group"; empty: root
	Workdir string            `json:"workdir,omitempty"`
	Cmd     []string          `json:"cmd,omitempty"`
}

// Template is one immutable environment in a Store. It is a value: it stays
// valid for as long as a lease or a name keeps the template.
type Template struct {
	Digest      Digest    // of the image and the config together
	ImageDigest Digest    // of the image file alone
	Image       string    // absolute path of the EROFS file, named by its digest
	ImageBytes  int64     // its size
	Dir         string    // absolute path of the template's directory; SnapshotDir is inside
	Config      Config    // the defaults of its processes
	Source      string    // what it was made from, for people
	Created     time.Time // when it was first made here
	Notes       []string  // files that were left out of the image: one line per reason
}

// SnapshotDir is the directory for snapshots of the template. The store creates its
// parent and removes it with the template, and does not use it otherwise.
func (t Template) SnapshotDir() string { return t.Dir + "/snapshots" }

// DefaultTag is the tag of a name without one.
const DefaultTag = "default"

// Ref is a template's name and tag.
type Ref struct {
	Name string // [namespace/]name
	Tag  string
}

var (
	refName = regexp.MustCompile(`^([a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?/)?[a-z0-9]([a-z0-9._-]{0,126}[a-z0-9])?$`)
	refTag  = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]{0,126}[a-z0-9])?$`)
	uuid    = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
	hex64   = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// ParseRef reads "[namespace/]name[:tag]". A tag that looks like the id of a
// build is refused, as is a name that could be taken for a digest.
func ParseRef(s string) (Ref, error) {
	bad := func(why string) error {
		return kind.Errorf(kind.Invalid, "%.200q is not a template name: %s", s, why).
			WithField("name").WithHint("want [namespace/]name[:tag] of a-z, 0-9 and inner '.', '_', '-'")
	}
	name, tag, tagged := strings.Cut(s, ":")
	switch {
	case !tagged:
		tag = DefaultTag
	case tag == "":
		return Ref{}, bad("the tag is empty")
	case !refTag.MatchString(tag):
		return Ref{}, bad("the tag has an invalid character or length")
	case shortDigest.MatchString(s):
		return Ref{}, bad("it looks like the beginning of a digest")
	case uuid.MatchString(tag) || hex64.MatchString(tag):
		return Ref{}, bad("the tag looks like a build id or a digest")
	}
	switch {
	case name == "":
		return Ref{}, bad("the name is empty")
	case !refName.MatchString(name) || strings.Contains(name, ".."):
		return Ref{}, bad("the name has an invalid character or length")
	case hex64.MatchString(name):
		return Ref{}, bad("the name looks like a digest")
	}
	return Ref{Name: name, Tag: tag}, nil
}

// String returns the ref with its tag.
func (r Ref) String() string { return r.Name + ":" + r.Tag }

// dir is the directory of the tags of r's name. "_" stands for no namespace, since
// no name can begin with it.
func (r Ref) dir() string {
	ns, name, ok := strings.Cut(r.Name, "/")
	if !ok {
		return "refs/_/" + r.Name
	}
	return "refs/" + ns + "/" + name
}

func (r Ref) file() string { return r.dir() + "/" + r.Tag }

// Event is one step of a build's progress.
type Event struct {
	Phase string // "read", then "write"; Done and Total begin again in each
	Done  int64  // bytes
	Total int64  // bytes, or 0 when not known
}

// Progress receives the events of a build. It is called often and must not
// block.
type Progress func(Event)
