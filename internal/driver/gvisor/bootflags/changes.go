package bootflags

// How the driver asks a running sentry what its guest changed.
//
// gVisor's control protocol has one call that code outside gVisor can extend:
// containerManager.CreateTraceSession makes a sink by its registered name and
// hands it a descriptor. The sentry registers ChangesSink, which writes a tar
// to that descriptor and then refuses to be made, so that no trace session
// exists afterwards: the call always fails, and its error ends with
// ChangesWritten if the tar is complete.
//
// Entries of the tar are the files of the writable layer as overlayfs stores
// them (a deletion is the character device 0:0). Two PAX records carry what
// tar cannot; extended attributes of files have the prefix "SCHILY.xattr.", so
// that a guest can forge neither.
const (
	// ChangesSink is the name of the sink.
	ChangesSink = "bivy-changes"
	// ChangesWritten ends the error of a call that did all its work.
	ChangesWritten = "the changes are written"

	// SparseRecord holds the size in bytes of a file with holes. The content
	// of its entry is a map and the data, as in GNU's PAX format 1.0.
	SparseRecord = "BIVY.sparse"
	// SocketType is the type of an entry that is a socket, without content.
	SocketType = 's'
	// ReportRecord marks the last entry, whose content is a Report in JSON.
	ReportRecord = "BIVY.report"
)

// MaxReport bounds the JSON of a Report in bytes.
const MaxReport = 1 << 20

// Report says what the entries before it leave out.
type Report struct {
	// Outside lists file systems that are not the writable layer and hold
	// files, at most MaxOutside.
	Outside []Outside `json:"outside,omitempty"`
	// Lost counts files that the tar should hold and does not, and places that
	// could not be counted; Why is the first reason.
	Lost int64  `json:"lost,omitempty"`
	Why  string `json:"why,omitempty"`
}

// MaxOutside bounds Report.Outside. When there are more, the last stands for
// all that remain.
const MaxOutside = 256

// MaxOutsidePath bounds Outside.Path in bytes.
const MaxOutsidePath = 1024

// Outside is a file system that is not the writable layer.
type Outside struct {
	Path  string `json:"path"`            // where it is mounted in the guest
	Files int64  `json:"files"`           // entries below it that are no directories
	Bytes int64  `json:"bytes"`           // sum of the sizes of its regular files
	Guest bool   `json:"guest,omitempty"` // the guest mounted it
}
