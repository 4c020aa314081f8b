package tree

import "fmt"

// Limits limit the size of one image. They are checked while the input is read, so
// that a decompression bomb cannot fill the disk. A zero field takes its value from
// DefaultLimits.
type Limits struct {
	Bytes        int64 // contents of all regular files of all layers, uncompressed
	Entries      int64 // names in all layers, whiteouts included
	Layers       int64 // layers of one image
	PathBytes    int64 // length of one path
	NameBytes    int64 // length of one path component
	Depth        int64 // components of one path
	SymlinkBytes int64 // length of one symlink's target
	Links        int64 // names of one file
	XattrBytes   int64 // names and values of one entry's extended attributes
	MetaBytes    int64 // paths, symlink targets and extended attributes in all
	StreamBytes  int64 // one layer or tar as a stream, uncompressed, headers and padding included
	ConfigBytes  int64 // one manifest, index or configuration of an image
}

// MaxPath is the length in bytes of the longest path that a guest can use, and of
// the longest symlink target that gVisor reads from an image.
const MaxPath = 4095

// DefaultLimits returns the limits used where the caller sets none. They are larger
// than common images need, and keep a build within a few hundred MiB of memory.
func DefaultLimits() Limits {
	return Limits{
		Bytes:        16 << 30,
		Entries:      1_000_000,
		Layers:       256,
		PathBytes:    MaxPath,
		NameBytes:    255,
		Depth:        256,
		SymlinkBytes: MaxPath,
		Links:        65_000,
		XattrBytes:   64 << 10,
		MetaBytes:    256 << 20,
		StreamBytes:  24 << 30,
		ConfigBytes:  8 << 20,
	}
}

// WithDefaults fills the fields that are zero.
func (l Limits) WithDefaults() Limits {
	d := DefaultLimits()
	for _, f := range []struct {
		p *int64
		v int64
	}{
		{&l.Bytes, d.Bytes}, {&l.Entries, d.Entries}, {&l.Layers, d.Layers},
		{&l.PathBytes, d.PathBytes}, {&l.NameBytes, d.NameBytes}, {&l.Depth, d.Depth},
		{&l.SymlinkBytes, d.SymlinkBytes}, {&l.Links, d.Links}, {&l.XattrBytes, d.XattrBytes},
		{&l.MetaBytes, d.MetaBytes}, {&l.StreamBytes, d.StreamBytes}, {&l.ConfigBytes, d.ConfigBytes},
	} {
		if *f.p == 0 {
			*f.p = f.v
		}
	}
	return l
}

// LimitError means that an input exceeds a limit. Its text does not name the layer:
// the code that reads the layers adds it when it wraps the error.
type LimitError struct {
	Limit string // the name of the field of Limits, e.g. "Bytes"
	Max   int64
	Layer string // empty when the input has no layers
	Entry string // empty when the limit is not about one entry
}

func (e *LimitError) Error() string {
	where := ""
	if e.Entry != "" {
		where = fmt.Sprintf("entry %.256q: ", e.Entry)
	}
	return fmt.Sprintf("%sexceeds the limit %s of %d", where, e.Limit, e.Max)
}
