package tree

import "fmt"

// Limits bound what one image may hold. They are checked while the input is
// read, so a bomb costs at most the limit and never the disk. A zero field
// takes its value from DefaultLimits.
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

// MaxPath is the length of the longest path a guest can name, and of the
// longest target gVisor reads from a symlink whose data has a block of its own.
const MaxPath = 4095

// DefaultLimits returns the limits used where the caller names none. They
// admit every image we know of and keep a build within a few hundred MiB of
// memory.
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

// LimitError says which limit an input exceeds, and where. Its text does not
// name the layer: the reader of the layers adds that when it wraps the error.
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
	return fmt.Sprintf("%sover the limit %s of %d", where, e.Limit, e.Max)
}
