package gvisor

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"gvisor.dev/gvisor/pkg/control/client"
	"gvisor.dev/gvisor/pkg/sentry/seccheck"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"

	"bivy/internal/driver"
	"bivy/internal/driver/gvisor/bootflags"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// ExportChanges implements driver.Exporter. The sentry writes the upper layer
// of the root file system that it was started with, and what else holds files
// (bootflags.ChangesSink). It looks at file systems, not at what is mounted
// where, which root inside can change. Its conventions for deletions are
// overlayfs's and become OCI's here.
//
// A file with large holes becomes a sparse entry in GNU's PAX format 1.0.
func (d *Driver) ExportChanges(ctx context.Context, id session.SandboxID, w io.Writer) (driver.ChangeReport, error) {
	s, err := d.find(id)
	if err != nil {
		return driver.ChangeReport{}, err
	}
	// Taken from a channel: when ctx ends first, the operation goes on by
	// itself and must not write to what was returned.
	got := make(chan driver.ChangeReport, 1)
	err = s.do(ctx, func() error {
		report, err := s.export(ctx, w)
		got <- report
		return err
	})
	select {
	case report := <-got:
		return report, err
	default:
		return driver.ChangeReport{}, err
	}
}

func (s *sandbox) export(ctx context.Context, w io.Writer) (driver.ChangeReport, error) {
	before, err := s.group.Stats()
	if err != nil {
		return driver.ChangeReport{}, err
	}
	kills := before.OOMKills
	// A guest may have filled its memory to the limit. Only while it is
	// frozen: it could use the room itself.
	if s.paused && s.req.Limits.MemoryBytes > 0 {
		if err := s.group.LimitMemory(s.req.Limits.MemoryBytes + exportSlack); err != nil {
			return driver.ChangeReport{}, fmt.Errorf("room to export %s: %w", s.id, err)
		}
		defer func() {
			// Fails while more than the limit is still held; a guest that is to
			// run again gets its limit back with its resume.
			_ = s.group.LimitMemory(s.req.Limits.MemoryBytes)
		}()
	}
	read, write, err := os.Pipe()
	if err != nil {
		return driver.ChangeReport{}, err
	}
	defer read.Close()
	// An ended context must not leave the copy waiting for the guest kernel.
	stop := context.AfterFunc(ctx, func() { read.Close() })
	defer stop()
	produced := make(chan error, 1)
	go func() { // ends when the tar is written or its reader has closed the pipe
		err := s.askChanges(write)
		produced <- errors.Join(err, write.Close())
	}()
	report, err := toOCI(w, read)
	read.Close()
	if producer := <-produced; producer != nil && (err == nil || errors.Is(err, io.ErrUnexpectedEOF)) {
		// A tar cut short is the symptom; why its producer stopped is the cause.
		err = producer
		if st, statErr := s.group.Stats(); statErr == nil && st.OOMKills > kills {
			err = kind.Errorf(kind.Exhausted, "the guest kernel ran out of memory while it read a file: %w", producer)
		}
	}
	if ctx.Err() != nil {
		return report, ctx.Err()
	}
	if err != nil {
		return report, fmt.Errorf("changes of %s: %w", s.id, err)
	}
	return report, nil
}

// exportSlack is the memory in bytes that reading and writing needs.
const exportSlack = 64 << 20

// askChanges lets the sentry write its changes to a pipe.
func (s *sandbox) askChanges(pipe *os.File) error {
	conn, err := client.ConnectTo(s.runsc.ControlSocketPath)
	if err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	defer conn.Close()
	args := boot.CreateTraceSessionArgs{
		Config:      seccheck.SessionConfig{Name: seccheck.DefaultSessionName, Sinks: []seccheck.SinkConfig{{Name: bootflags.ChangesSink}}},
		FilePayload: urpc.FilePayload{Files: []*os.File{pipe}},
	}
	err = conn.Call(boot.ContMgrCreateTraceSession, &args, nil)
	switch {
	case err == nil:
		return errors.New("the sentry made a trace session instead of writing its changes")
	case strings.HasSuffix(err.Error(), bootflags.ChangesWritten):
		return nil
	}
	return err
}

// whiteout is an entry that stands for a deletion.
func whiteout(name string, at time.Time) *tar.Header {
	return &tar.Header{Typeflag: tar.TypeReg, Name: name, ModTime: at, Mode: 0o600, Format: tar.FormatPAX,
		PAXRecords: map[string]string{driver.WhiteoutRecord: "1"}}
}

// Names that OCI layers give to deletions (image-spec, layer.md).
const (
	whiteoutPrefix = ".wh."
	opaqueName     = ".wh..wh..opq"
	// overlayOpaque is gVisor's own mark of an opaque directory; one that a
	// guest sets is in another namespace of attributes.
	overlayOpaque = "SCHILY.xattr.trusted.overlay.opaque"
)

// mountPoints are directories that the runtime makes to mount on. What is in
// them, below the mounts, is the guest's like everything else.
var mountPoints = []string{"proc", "sys", "dev", "run"}

// toOCI converts what a sentry writes for bootflags.ChangesSink. The names and
// contents in it are the guest's.
func toOCI(w io.Writer, r io.Reader) (driver.ChangeReport, error) {
	in, out := tar.NewReader(r), tar.NewWriter(w)
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return driver.ChangeReport{}, io.ErrUnexpectedEOF // there was no report
		}
		if err != nil {
			return driver.ChangeReport{}, err
		}
		if _, ok := h.PAXRecords[bootflags.ReportRecord]; ok {
			report, lost := readReport(in)
			if err := out.Close(); err != nil {
				return report, err
			}
			return report, lost
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		_, opaque := h.PAXRecords[overlayOpaque]
		if name == "" || h.Typeflag == tar.TypeDir && !opaque && slices.Contains(mountPoints, name) {
			continue
		}
		real, isSparse := h.PAXRecords[bootflags.SparseRecord]
		for _, ours := range []string{driver.WhiteoutRecord, bootflags.SparseRecord} {
			delete(h.PAXRecords, ours)
		}
		switch {
		case h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0:
			dir, base := path.Split(name)
			h = whiteout(dir+whiteoutPrefix+base, h.ModTime)
		case h.Typeflag == tar.TypeDir:
			h.Name = name + "/"
		case h.Typeflag == tar.TypeLink:
			h.Name, h.Linkname = name, strings.TrimPrefix(path.Clean("/"+h.Linkname), "/")
		case h.Typeflag == bootflags.SocketType:
			h.Name, h.Typeflag = name, driver.SocketType
		default:
			h.Name = name
		}
		h.Format = tar.FormatPAX
		if isSparse && h.Typeflag == tar.TypeReg {
			size, err := strconv.ParseInt(real, 10, 64)
			if err != nil || size < 0 {
				return driver.ChangeReport{}, fmt.Errorf("%q: a size of %.40q", name, real)
			}
			if err := sparseHeader(out, w, h, size); err != nil {
				return driver.ChangeReport{}, fmt.Errorf("%q: %w", name, err)
			}
		} else if err := out.WriteHeader(h); err != nil {
			return driver.ChangeReport{}, fmt.Errorf("%q: %w", name, err)
		}
		if h.Size > 0 {
			if _, err := io.Copy(out, in); err != nil {
				return driver.ChangeReport{}, err
			}
		}
		if opaque && h.Typeflag == tar.TypeDir {
			if err := out.WriteHeader(whiteout(h.Name+opaqueName, h.ModTime)); err != nil {
				return driver.ChangeReport{}, err
			}
		}
	}
}

// readReport reads what a sentry says is not in its tar. The error says what
// of the guest's files is missing.
func readReport(r io.Reader) (driver.ChangeReport, error) {
	var said bootflags.Report
	b, err := io.ReadAll(io.LimitReader(r, bootflags.MaxReport+1))
	if err != nil {
		return driver.ChangeReport{}, err
	}
	if len(b) > bootflags.MaxReport {
		return driver.ChangeReport{}, fmt.Errorf("the report has more than %d bytes", bootflags.MaxReport)
	}
	if err := json.Unmarshal(b, &said); err != nil {
		return driver.ChangeReport{}, fmt.Errorf("the report: %w", err)
	}
	if len(said.Outside) > bootflags.MaxOutside {
		return driver.ChangeReport{}, fmt.Errorf("the report names %d file systems, more than %d", len(said.Outside), bootflags.MaxOutside)
	}
	var report driver.ChangeReport
	for _, o := range said.Outside {
		if o.Files < 0 || o.Bytes < 0 {
			return driver.ChangeReport{}, errors.New("the report has negative counts")
		}
		report.Outside = append(report.Outside, driver.Outside(o))
	}
	if said.Lost != 0 {
		return report, kind.Errorf(kind.Exhausted, "%d of the guest's files or places could not be read: %s", said.Lost, said.Why)
	}
	return report, nil
}

// sparseHeader begins an entry in GNU's PAX format 1.0 for a file of size
// bytes, whose map and data follow with h.Size bytes. archive/tar reads the
// format and does not write it.
func sparseHeader(out *tar.Writer, w io.Writer, h *tar.Header, size int64) error {
	records := map[string]string{
		"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": h.Name, "GNU.sparse.realsize": strconv.FormatInt(size, 10),
		"uid": strconv.Itoa(h.Uid), "gid": strconv.Itoa(h.Gid), "mtime": strconv.FormatInt(h.ModTime.Unix(), 10), "size": strconv.FormatInt(h.Size, 10),
	}
	for k, v := range h.PAXRecords {
		if strings.HasPrefix(k, "SCHILY.xattr.") {
			records[k] = v
		}
	}
	var body bytes.Buffer
	for _, k := range slices.Sorted(maps.Keys(records)) {
		body.WriteString(paxRecord(k, records[k]))
	}
	if err := out.Flush(); err != nil { // the padding of the entry before
		return err
	}
	var extended bytes.Buffer
	tw := tar.NewWriter(&extended)
	if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "PaxHeaders.0/sparse", Size: int64(body.Len()), Mode: 0o600, Format: tar.FormatUSTAR}); err != nil {
		return err
	}
	if _, err := tw.Write(body.Bytes()); err != nil {
		return err
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	block := extended.Bytes()
	retype(block[:512], tar.TypeXHeader)
	if _, err := w.Write(block); err != nil {
		return err
	}
	main := &tar.Header{Typeflag: tar.TypeReg, Name: "GNUSparseFile.0/file", Size: h.Size, Mode: h.Mode, Format: tar.FormatUSTAR}
	if h.Size >= 1<<33 {
		main.Format = tar.FormatGNU // a number that USTAR cannot hold
	}
	return out.WriteHeader(main)
}

// paxRecord is one record of an extended header: its own length in decimal,
// key and value.
func paxRecord(k, v string) string {
	size := len(k) + len(v) + 3 // blank, equals sign, newline
	n := size + len(strconv.Itoa(size))
	n = size + len(strconv.Itoa(n))
	return strconv.Itoa(n) + " " + k + "=" + v + "\n"
}

// retype changes the type of a header block, and its checksum.
func retype(block []byte, flag byte) {
	const at, sum = 156, 148
	block[at] = flag
	copy(block[sum:sum+8], "        ")
	total := 0
	for _, b := range block {
		total += int(b)
	}
	copy(block[sum:sum+8], fmt.Sprintf("%06o\x00 ", total))
}
