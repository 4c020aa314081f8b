package drivertest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/session"
)

func pause(e *env) {
	p := optional[driver.Pauser](e, "Pauser", e.d.Capabilities().Pause)
	e.wantKind("Pause of an unknown sandbox", p.Pause(e.ctx, e.newID()), kind.NotFound)
	id, _ := e.start()
	e.sh(id, "echo before > note")
	for range 2 {
		if err := p.Pause(e.ctx, id); err != nil {
			e.Fatalf("Pause: %v", err)
		}
	}
	if running, ok := e.found(id); !ok || !running {
		e.Errorf("List of a paused sandbox: there %v, running %v", ok, running)
	}
	answered := make(chan error, 1)
	go func() {
		_, _, err := e.h.Exec(e.ctx, e.d, id, "sh", "-c", "cat note")
		answered <- err
	}()
	select {
	case err := <-answered:
		e.Errorf("a paused sandbox answers (error %v)", err)
	case <-time.After(100 * time.Millisecond):
	}
	for range 2 {
		if err := p.Resume(e.ctx, id); err != nil {
			e.Fatalf("Resume: %v", err)
		}
	}
	if got := e.sh(id, "cat note"); got != "before" {
		e.Errorf("after the pause: %q", got)
	}
	if err := p.Pause(e.ctx, id); err != nil {
		e.Fatalf("Pause: %v", err)
	}
	e.destroy(id)
	e.nothingLeft(e.ctx)
}

func checkpoint(e *env) {
	c := optional[driver.Checkpointer](e, "Checkpointer", e.d.Capabilities().Snapshot)
	id, _ := e.start()
	e.sh(id, "echo kept > note; mkdir -p a/b; echo deep > a/b/c")
	e.sh(id, "sleep 1000 >/dev/null 2>&1 </dev/null & echo $! > pid")
	dir := e.emptyDir()
	if err := c.Checkpoint(e.ctx, id, dir, leave); err != nil {
		e.Fatalf("Checkpoint: %v", err)
	}
	// The original goes on, and what it does now is not in the snapshot.
	e.sh(id, "cat note; echo later > late; echo changed > note")
	for range 2 { // a snapshot can be restored more than once
		copied := e.restore(dir)
		if got := e.sh(copied, "cat note a/b/c"); got != "kept\ndeep" {
			e.Errorf("in the restored sandbox: %q", got)
		}
		e.sh(copied, "test ! -e late")
		if e.h.KeepsProcesses {
			e.sh(copied, "kill -0 $(cat pid)")
		}
		e.sh(copied, "echo own > note")
	}
	if got := e.sh(id, "cat note"); got != "changed" {
		e.Errorf("the copies changed the original: %q", got)
	}
}

// leave makes a checkpoint leave the sandbox as it was.
var leave = driver.CheckpointOptions{Leave: true}

func (e *env) emptyDir() driver.Dir {
	e.Helper()
	dir := filepath.Join(e.TempDir(), "snapshot")
	if err := os.Mkdir(dir, 0o700); err != nil {
		e.Fatal(err)
	}
	return driver.Dir(dir)
}

func (e *env) restore(from driver.Source) session.SandboxID {
	e.Helper()
	id := e.newID()
	req := e.h.Request(e.T, id)
	req.Snapshot = from
	if _, err := e.d.Start(e.ctx, req); err != nil {
		e.Fatalf("Start from a snapshot: %v", err)
	}
	return id
}

func checkpointStop(e *env) {
	c := optional[driver.Checkpointer](e, "Checkpointer", e.d.Capabilities().Snapshot)
	id, _ := e.start()
	e.sh(id, "echo kept > note")
	dir := e.emptyDir()
	if err := c.Checkpoint(e.ctx, id, dir, driver.CheckpointOptions{}); err != nil {
		e.Fatalf("Checkpoint: %v", err)
	}
	if _, err := e.d.Wait(e.ctx, id); err != nil && !kind.Is(err, kind.NotFound) {
		e.Errorf("Wait for a sandbox stopped by its checkpoint: %v", err)
	}
	if running, _ := e.found(id); running {
		e.Error("the sandbox still runs")
	}
	e.destroy(id)
	if got := e.sh(e.restore(dir), "cat note"); got != "kept" {
		e.Errorf("in the restored sandbox: %q", got)
	}
}

// counter is a shell command in the background that appends to the file
// "ticks" for as long as the guest runs.
const counter = "(while :; do echo . >> ticks; sleep 0.01; done) >/dev/null 2>&1 </dev/null &"

// checkpointPaused saves a paused sandbox: it does not run in between, is
// still paused afterwards, and goes on when it is resumed.
func checkpointPaused(e *env) {
	c := optional[driver.Checkpointer](e, "Checkpointer", e.d.Capabilities().Snapshot)
	p := optional[driver.Pauser](e, "Pauser", e.d.Capabilities().Pause)
	id, _ := e.start()
	e.sh(id, "echo kept > note; "+counter)
	if err := p.Pause(e.ctx, id); err != nil {
		e.Fatalf("Pause: %v", err)
	}
	first, second := e.emptyDir(), e.emptyDir()
	for _, dir := range []driver.Dir{first, second} {
		if err := c.Checkpoint(e.ctx, id, dir, leave); err != nil {
			e.Fatalf("Checkpoint of a paused sandbox: %v", err)
		}
	}
	answered := make(chan error, 1)
	go func() {
		_, _, err := e.h.Exec(e.ctx, e.d, id, "sh", "-c", "cat note")
		answered <- err
	}()
	select {
	case err := <-answered:
		e.Errorf("a paused sandbox answers after its checkpoint (error %v)", err)
	case <-time.After(100 * time.Millisecond):
	}
	// What the guest did while it was saved would be in the second copy only.
	if !e.h.KeepsProcesses { // a copy whose counter goes on does not stand still
		one, two := e.sh(e.restore(first), "wc -c < ticks"), e.sh(e.restore(second), "wc -c < ticks")
		if one != two {
			e.Errorf("the guest ran between two checkpoints: %s, then %s ticks", one, two)
		}
	}
	if err := p.Resume(e.ctx, id); err != nil {
		e.Fatalf("Resume after a checkpoint: %v", err)
	}
	before := e.sh(id, "cat note; wc -c < ticks")
	if !strings.HasPrefix(before, "kept") {
		e.Errorf("after the resume: %q", before)
	}
	for before == e.sh(id, "cat note; wc -c < ticks") { // ends with the test's context
		continue
	}
	if got := e.sh(e.restore(second), "cat note"); got != "kept" {
		e.Errorf("in the sandbox restored from a paused one: %q", got)
	}

	if err := p.Pause(e.ctx, id); err != nil {
		e.Fatalf("Pause: %v", err)
	}
	last := e.emptyDir()
	if err := c.Checkpoint(e.ctx, id, last, driver.CheckpointOptions{}); err != nil {
		e.Fatalf("Checkpoint that stops a paused sandbox: %v", err)
	}
	if _, err := e.d.Wait(e.ctx, id); err != nil && !kind.Is(err, kind.NotFound) {
		e.Errorf("Wait for a sandbox stopped by its checkpoint: %v", err)
	}
	e.destroy(id)
	if got := e.sh(e.restore(last), "cat note"); got != "kept" {
		e.Errorf("in the sandbox restored from a paused one that was stopped: %q", got)
	}
}

func checkpointRefusals(e *env) {
	c := optional[driver.Checkpointer](e, "Checkpointer", e.d.Capabilities().Snapshot)
	e.wantKind("Checkpoint of an unknown sandbox", c.Checkpoint(e.ctx, e.newID(), e.emptyDir(), leave), kind.NotFound)
	id, _ := e.start()
	e.sh(id, "true")
	if err := c.Checkpoint(e.ctx, id, brokenSink{}, leave); !errors.Is(err, errBroken) {
		e.Errorf("Checkpoint to a sink that fails: %v", err)
	}
	full := e.emptyDir()
	if err := c.Checkpoint(e.ctx, id, full, leave); err != nil {
		e.Fatalf("Checkpoint: %v", err)
	}
	if err := c.Checkpoint(e.ctx, id, full, leave); err == nil {
		e.Error("Checkpoint onto the files of another succeeded")
	}
	e.sh(id, "echo unharmed")

	for what, from := range map[string]driver.Source{"an empty directory": e.emptyDir(), "a source that fails": brokenSink{}} {
		bad := e.newID()
		req := e.h.Request(e.T, bad)
		req.Snapshot = from
		if _, err := e.d.Start(e.ctx, req); err == nil {
			e.Errorf("Start from %s as snapshot succeeded", what)
		}
		if _, ok := e.found(bad); ok {
			e.Errorf("a Start from %s left something behind", what)
		}
	}
}

// brokenSink is a Sink and a Source of nothing.
type brokenSink struct{}

func (brokenSink) Create(string) (*os.File, error) { return nil, errBroken }
func (brokenSink) Open(string) (*os.File, error)   { return nil, errBroken }

// setLimits lowers limits of a running sandbox, which then hold.
func setLimits(e *env) {
	l := optional[driver.Limiter](e, "Limiter", true)
	e.wantKind("SetLimits of an unknown sandbox", l.SetLimits(e.ctx, e.newID(), driver.Limits{}), kind.NotFound)
	id, handle := e.start()
	e.sh(id, "true")
	limits := e.h.Request(e.T, id).Limits
	other := limits
	other.DiskBytes += 1 << 20
	e.wantKind("SetLimits with another disk", l.SetLimits(e.ctx, id, other), kind.Invalid)

	limits.CPUMillis = 200
	if limits.PIDs > 0 {
		limits.PIDs--
	}
	for range 2 {
		if err := l.SetLimits(e.ctx, id, limits); err != nil {
			e.Fatalf("SetLimits: %v", err)
		}
	}
	e.limitsHold(id)
	e.restart()
	if _, err := e.d.Recover(e.ctx, handle); err != nil {
		e.Fatalf("Recover: %v", err)
	}
	e.limitsHold(id)
	e.destroy(id)
}

// limitsHold checks that the limits of setLimits are those that the driver
// wants and that they are enforced, as far as it claims to.
func (e *env) limitsHold(id session.SandboxID) {
	e.Helper()
	if i, ok := e.d.(driver.Inspector); ok {
		if p, err := i.Inspect(e.ctx, id); err != nil || !p.OK() {
			e.Errorf("posture after SetLimits: %+v, %v", p, err)
		}
	}
	s, ok := e.d.(driver.Statter)
	if !ok || !slices.Contains(e.d.Capabilities().Limits, "cpu") {
		return
	}
	before, err := s.Stats(e.ctx, id)
	if err != nil {
		e.Fatalf("Stats: %v", err)
	}
	began := time.Now()
	if _, _, err := e.h.Exec(e.ctx, e.d, id, "timeout", "2", "sh", "-c", "while :; do :; done"); err != nil {
		e.Fatalf("a busy loop: %v", err)
	}
	after, err := s.Stats(e.ctx, id)
	if err != nil {
		e.Fatalf("Stats: %v", err)
	}
	if share := float64(after.CPU-before.CPU) / float64(time.Since(began)); share > 0.35 {
		e.Errorf("used %.2f cores with a limit lowered to 0.2", share)
	}
}

// recorder is an Outbound that echoes and reports every flow.
type recorder struct {
	flows chan recorded
}

type recorded struct {
	id  session.SandboxID
	src netip.AddrPort
	dst netip.AddrPort
}

// Ports that recorder treats in its own way.
const (
	refusedPort = 81
	panicPort   = 82
	stuckPort   = 83
)

func (r recorder) Flow(ctx context.Context, id session.SandboxID, f driver.Flow) {
	r.flows <- recorded{id, f.Source(), f.Destination()}
	switch f.Destination().Port() {
	case refusedPort:
		return
	case panicPort:
		panic("a handler that panics")
	case stuckPort:
		<-ctx.Done()
		return
	}
	c, err := f.Accept()
	if err != nil {
		return
	}
	// What comes is sent back behind a prefix.
	b := make([]byte, 64)
	n, err := c.Read(b)
	if err == nil {
		_, _ = c.Write(append([]byte("echo:"), b[:n]...)) // an error shows in the guest
	}
}

// outbound lets a guest connect to any address through a handler, and shows
// that without one it is refused.
func outbound(e *env) {
	if e.h.NewOutbound == nil || e.h.Talk == nil {
		e.Skip("the harness has no outbound handler")
	}
	dark, _ := e.start()
	if out, exit, err := e.h.Exec(e.ctx, e.d, dark, e.h.Talk("192.0.2.7", 443, "hello")...); err != nil || exit == 0 {
		e.Errorf("without a handler: exit %d, error %v, output %q; want it refused", exit, err, out)
	}
	e.destroy(dark)
	if err := e.d.Close(); err != nil {
		e.Fatalf("Close: %v", err)
	}
	r := recorder{flows: make(chan recorded, 1024)}
	e.d = e.h.NewOutbound(e.T, e.root, r)
	id, _ := e.start()
	talk := func(addr string, port uint16) (string, int) {
		e.Helper()
		out, exit, err := e.h.Exec(e.ctx, e.d, id, e.h.Talk(addr, port, "hello")...)
		if err != nil {
			e.Fatalf("exec: %v", err)
		}
		return strings.TrimSpace(out), exit
	}
	reached := func(addr string, port uint16) {
		e.Helper()
		select {
		case got := <-r.flows:
			if got.id != id || got.dst != netip.AddrPortFrom(netip.MustParseAddr(addr), port) || !got.src.IsValid() {
				e.Errorf("a connection to %s port %d came as %+v", addr, port, got)
			}
		case <-e.ctx.Done():
			e.Fatalf("a connection to %s port %d does not reach the handler", addr, port)
		}
	}
	for _, addr := range []string{"192.0.2.7", "203.0.113.9"} {
		if out, exit := talk(addr, 443); exit != 0 || out != "echo:hello" {
			e.Errorf("talk to %s: exit %d, %q", addr, exit, out)
		}
		reached(addr, 443)
	}
	for _, port := range []uint16{refusedPort, panicPort} {
		if out, exit := talk("192.0.2.7", port); exit == 0 {
			e.Errorf("port %d answered %q; want it refused", port, out)
		}
		reached("192.0.2.7", port)
	}
	// A handler that never returns holds one flow; the guest is reachable and
	// its other connections come through.
	e.sh(id, "("+shellQuote(e.h.Talk("192.0.2.7", stuckPort, "hello"))+") >/dev/null 2>&1 </dev/null &")
	reached("192.0.2.7", stuckPort)
	if out, exit := talk("192.0.2.8", 443); exit != 0 || out != "echo:hello" {
		e.Errorf("beside a handler that hangs: exit %d, %q", exit, out)
	}
	reached("192.0.2.8", 443)
	e.destroy(id)
	e.nothingLeft(e.ctx)
}

func shellQuote(argv []string) string {
	var words []string
	for _, a := range argv {
		words = append(words, "'"+strings.ReplaceAll(a, "'", `'\''`)+"'")
	}
	return strings.Join(words, " ")
}

func exportChanges(e *env) {
	x := optional[driver.Exporter](e, "Exporter", e.d.Capabilities().Export)
	_, err := x.ExportChanges(e.ctx, e.newID(), io.Discard)
	e.wantKind("ExportChanges of an unknown sandbox", err, kind.NotFound)
	id, _ := e.start()
	e.sh(id, "mkdir -p made/inner; printf content > made/inner/file; ln -s file made/inner/link; printf gone > gone; rm gone")
	if e.h.Changeable != "" {
		e.sh(id, "printf overwritten > "+e.h.Changeable)
	}
	if e.h.Existing != "" {
		e.sh(id, "rm "+e.h.Existing)
	}
	e.checkExport(x, id)
	if p, ok := e.d.(driver.Pauser); ok && e.d.Capabilities().Pause {
		if err := p.Pause(e.ctx, id); err != nil {
			e.Fatalf("Pause: %v", err)
		}
		e.checkExport(x, id)
	}
	if _, err := x.ExportChanges(e.ctx, id, brokenWriter{}); !errors.Is(err, errBroken) {
		e.Errorf("ExportChanges to a writer that fails: %v", err)
	}
	e.destroy(id)
}

var errBroken = errors.New("the writer is broken")

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errBroken }

func (e *env) checkExport(x driver.Exporter, id session.SandboxID) {
	e.Helper()
	var buf bytes.Buffer
	if _, err := x.ExportChanges(e.ctx, id, &buf); err != nil {
		e.Fatalf("ExportChanges: %v", err)
	}
	entries := map[string]*tar.Header{}
	content := map[string]string{}
	tr := tar.NewReader(&buf)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			e.Fatalf("the export does not read: %v", err)
		}
		b, err := io.ReadAll(tr)
		if err != nil {
			e.Fatalf("the export does not read at %s: %v", h.Name, err)
		}
		name := path.Join("/", h.Name)
		entries[name], content[name] = h, string(b)
	}
	// Where Exec's directory is in the image, only the harness knows.
	find := func(suffix string) string {
		for name := range entries {
			if strings.HasSuffix(name, suffix) {
				return name
			}
		}
		return ""
	}
	if got := content[find("/made/inner/file")]; got != "content" {
		e.Errorf("the new file has %q in the export", got)
	}
	if h := entries[find("/made/inner/link")]; h == nil || h.Typeflag != tar.TypeSymlink || h.Linkname != "file" {
		e.Errorf("the new link in the export: %+v", h)
	}
	if name := find("/gone"); name != "" {
		e.Errorf("a file that came and went is in the export: %s", name)
	}
	if e.h.Changeable != "" {
		if got := content[find("/"+path.Base(e.h.Changeable))]; got != "overwritten" {
			e.Errorf("the overwritten file has %q in the export", got)
		}
	}
	if e.h.Existing != "" && find("/.wh."+path.Base(e.h.Existing)) == "" {
		e.Errorf("the deleted %s has no whiteout in the export", e.h.Existing)
	}
}

func stats(e *env) {
	s := optional[driver.Statter](e, "Statter", true)
	_, err := s.Stats(e.ctx, e.newID())
	e.wantKind("Stats of an unknown sandbox", err, kind.NotFound)
	id, _ := e.start()
	e.sh(id, "true")
	before, err := s.Stats(e.ctx, id)
	if err != nil {
		e.Fatalf("Stats: %v", err)
	}
	if before.OOMKills != 0 {
		e.Errorf("Stats of a fresh sandbox: %+v", before)
	}
	e.sh(id, "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
	after, err := s.Stats(e.ctx, id)
	if err != nil {
		e.Fatalf("Stats: %v", err)
	}
	if after.CPU < before.CPU || (before.CPU > 0 && after.CPU == before.CPU) {
		e.Errorf("CPU time went from %s to %s while the sandbox worked", before.CPU, after.CPU)
	}
	if after.MemoryPeakBytes < after.MemoryBytes && after.MemoryPeakBytes != 0 {
		e.Errorf("peak memory %d is below %d now", after.MemoryPeakBytes, after.MemoryBytes)
	}
}

func inspect(e *env) {
	i := optional[driver.Inspector](e, "Inspector", true)
	_, err := i.Inspect(e.ctx, e.newID())
	e.wantKind("Inspect of an unknown sandbox", err, kind.NotFound)
	id, _ := e.start()
	e.sh(id, "true")
	// What is asked for twice must not differ.
	for range 2 {
		p, err := i.Inspect(e.ctx, id)
		if err != nil {
			e.Fatalf("Inspect: %v", err)
		}
		for _, c := range p.Checks {
			if !c.OK {
				e.Errorf("%s: want %s, got %s", c.Name, c.Want, c.Got)
			}
		}
		if !p.OK() {
			e.Errorf("posture is not OK: %+v", p)
		}
	}
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	if _, err := i.Inspect(ctx, id); err != nil && !errors.Is(err, context.Canceled) {
		e.Errorf("Inspect with a context that has ended: %v", err)
	}
}
