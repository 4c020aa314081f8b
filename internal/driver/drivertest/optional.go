package drivertest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
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
	if err := c.Checkpoint(e.ctx, id, dir, true); err != nil {
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

func (e *env) emptyDir() string {
	e.Helper()
	dir := filepath.Join(e.TempDir(), "snapshot")
	if err := os.Mkdir(dir, 0o700); err != nil {
		e.Fatal(err)
	}
	return dir
}

func (e *env) restore(dir string) session.SandboxID {
	e.Helper()
	id := e.newID()
	req := e.h.Request(e.T, id)
	req.Snapshot = dir
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
	if err := c.Checkpoint(e.ctx, id, dir, false); err != nil {
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

func checkpointRefusals(e *env) {
	c := optional[driver.Checkpointer](e, "Checkpointer", e.d.Capabilities().Snapshot)
	e.wantKind("Checkpoint of an unknown sandbox", c.Checkpoint(e.ctx, e.newID(), e.emptyDir(), true), kind.NotFound)
	id, _ := e.start()
	e.sh(id, "true")
	full := e.emptyDir()
	if err := os.WriteFile(filepath.Join(full, "something"), nil, 0o600); err != nil {
		e.Fatal(err)
	}
	if err := c.Checkpoint(e.ctx, id, full, true); err == nil {
		e.Error("Checkpoint into a directory that is not empty succeeded")
	}
	e.sh(id, "echo unharmed")

	bad := e.newID()
	req := e.h.Request(e.T, bad)
	req.Snapshot = e.emptyDir()
	if _, err := e.d.Start(e.ctx, req); err == nil {
		e.Error("Start from an empty directory as snapshot succeeded")
	}
	if _, ok := e.found(bad); ok {
		e.Error("a Start from a bad snapshot left something behind")
	}
}

func exportChanges(e *env) {
	x := optional[driver.Exporter](e, "Exporter", e.d.Capabilities().Export)
	e.wantKind("ExportChanges of an unknown sandbox", x.ExportChanges(e.ctx, e.newID(), io.Discard), kind.NotFound)
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
	if err := x.ExportChanges(e.ctx, id, brokenWriter{}); !errors.Is(err, errBroken) {
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
	if err := x.ExportChanges(e.ctx, id, &buf); err != nil {
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
