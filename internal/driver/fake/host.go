package fake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"bivy/internal/driver"
	"bivy/internal/guest/wire"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// Host is the machine that sandboxes are on. It survives a restart of the
// daemon: in memory where the sandboxes are in-process, in Dir where they are
// child processes.
type Host struct {
	// Dir keeps the sandboxes' directories; empty: temporary ones, and no
	// other Host can find them.
	Dir string
	// Program makes the command that runs as the agent of a sandbox; it must
	// listen on the Unix socket. nil: an agent in-process.
	Program func(req driver.StartRequest, root, socket string) *exec.Cmd
	// AgentPort is the port that Dial reaches the agent by; 0: wire.Port.
	AgentPort uint16

	mu        sync.Mutex
	sandboxes map[session.SandboxID]*sandbox
}

// sandbox is one sandbox on a Host. Calls that change it hold its busy slot,
// one at a time.
type sandbox struct {
	ID      session.SandboxID   `json:"id"`
	Request driver.StartRequest `json:"request"`
	Child   *child              `json:"child,omitempty"` // nil: in-process
	Base    string              `json:"base,omitempty"`  // directory it was copied from

	dir   string
	busy  chan struct{} // one slot
	agent *agent
	exit  *stopping

	mu       sync.Mutex
	paused   chan struct{} // not nil while paused; closes at resume
	oomKills int64
	refused  uint64
}

// stopping is set once, when the sandbox stops.
type stopping struct {
	once sync.Once
	done chan struct{} // closed by set
	exit driver.Exit   // valid once done is closed
}

func newStopping() *stopping { return &stopping{done: make(chan struct{})} }

func (n *stopping) set(e driver.Exit) {
	n.once.Do(func() {
		e.At = time.Now()
		n.exit = e
		close(n.done)
	})
}

func (n *stopping) stopped() bool {
	select {
	case <-n.done:
		return true
	default:
		return false
	}
}

func (h *Host) port() uint16 {
	if h.AgentPort != 0 {
		return h.AgentPort
	}
	return wire.Port
}

// get returns a sandbox this Host has in memory.
func (h *Host) get(id session.SandboxID) (*sandbox, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s := h.sandboxes[id]; s != nil {
		return s, nil
	}
	return nil, kind.Errorf(kind.NotFound, "sandbox %s does not exist", id)
}

// running returns a sandbox that has not stopped.
func (h *Host) running(id session.SandboxID) (*sandbox, error) {
	s, err := h.get(id)
	if err != nil {
		return nil, err
	}
	if s.exit.stopped() {
		return nil, kind.Errorf(kind.Unavailable, "sandbox %s has stopped", id)
	}
	return s, nil
}

// hold waits for the calls for this sandbox that are before this one.
func (s *sandbox) hold(ctx context.Context) (release func(), err error) {
	select {
	case s.busy <- struct{}{}:
		return func() { <-s.busy }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *sandbox) root() string   { return filepath.Join(s.dir, "root") }
func (s *sandbox) socket() string { return filepath.Join(s.dir, "agent.sock") }

// Kill makes a sandbox stop by itself, as when its first process exits with
// code or is ended by signal.
func (h *Host) Kill(id session.SandboxID, code, signal int) {
	h.stop(id, driver.Exit{Code: code, Signal: signal})
}

// OOM counts kills by the memory limit; with fatal the sandbox stops for it.
func (h *Host) OOM(id session.SandboxID, kills int64, fatal bool) {
	s, err := h.get(id)
	if err != nil {
		return
	}
	s.mu.Lock()
	s.oomKills += kills
	s.mu.Unlock()
	if fatal {
		h.stop(id, driver.Exit{Code: -1, Signal: 9, OOM: true})
	}
}

// Refuse counts packets that tried to leave a sandbox.
func (h *Host) Refuse(id session.SandboxID, packets uint64) {
	s, err := h.get(id)
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused += packets
}

// Forget makes the in-process agent of a sandbox lose its processes, as if it
// had been replaced: how they ended is not known.
func (h *Host) Forget(id session.SandboxID) {
	s, err := h.get(id)
	if err != nil || s.agent == nil {
		return
	}
	s.agent.mu.Lock()
	defer s.agent.mu.Unlock()
	for pid, p := range s.agent.procs {
		p.kill()
		delete(s.agent.procs, pid)
	}
}

func (h *Host) stop(id session.SandboxID, e driver.Exit) {
	s, err := h.get(id)
	if err != nil {
		return
	}
	s.mu.Lock()
	e.OOM = e.OOM || s.oomKills > 0
	s.mu.Unlock()
	s.exit.set(e)
	s.halt()
}

// Reboot is what a power cut does: everything that ran is gone, directories
// are still there.
func (h *Host) Reboot() {
	h.mu.Lock()
	all := h.sandboxes
	h.sandboxes = nil
	h.mu.Unlock()
	for _, s := range all {
		s.exit.set(driver.Exit{Code: -1, Signal: 9})
		s.halt()
		if h.Dir == "" {
			os.RemoveAll(s.dir) // no other Host can find it
		}
	}
}

// add makes the sandbox's directory and registers it; nothing runs in it yet.
func (h *Host) add(req driver.StartRequest) (*sandbox, error) {
	if _, _, err := req.ID.Split(); err != nil {
		return nil, err
	}
	// A snapshot is read by fill and is not part of what is saved.
	saved := req
	saved.Snapshot = nil
	s := &sandbox{ID: req.ID, Request: saved, busy: make(chan struct{}, 1), exit: newStopping()}
	s.busy <- struct{}{} // held by Start
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.sandboxes[req.ID] != nil {
		return nil, exists(req.ID)
	}
	if h.Dir == "" {
		dir, err := os.MkdirTemp("", "bivy-fake-")
		if err != nil {
			return nil, err
		}
		s.dir = dir
	} else {
		if err := os.MkdirAll(h.Dir, 0o700); err != nil {
			return nil, err
		}
		s.dir = filepath.Join(h.Dir, string(req.ID))
		if err := os.Mkdir(s.dir, 0o700); errors.Is(err, fs.ErrExist) {
			return nil, exists(req.ID)
		} else if err != nil {
			return nil, err
		}
	}
	// Before anything runs, so that leftovers say whose they are.
	if err := s.save(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(s.dir))
	}
	if h.sandboxes == nil {
		h.sandboxes = map[session.SandboxID]*sandbox{}
	}
	h.sandboxes[req.ID] = s
	return s, nil
}

func exists(id session.SandboxID) error {
	return kind.Errorf(kind.Conflict, "sandbox %s exists already", id)
}

// fill gives the sandbox its files: those of the snapshot, or, without one,
// those of the image when that is a directory.
func (s *sandbox) fill(snapshot driver.Source) error {
	if err := os.Mkdir(s.root(), 0o755); err != nil {
		return err
	}
	if st, err := os.Stat(s.Request.Image); err == nil && st.IsDir() {
		s.Base = s.Request.Image
	}
	switch {
	case snapshot != nil:
		f, err := snapshot.Open(filesName)
		if err != nil {
			return kind.Errorf(kind.Invalid, "not a snapshot: %w", err).WithField("snapshot")
		}
		return errors.Join(importTree(s.root(), f), f.Close())
	case s.Base != "":
		return copyTree(s.root(), s.Base)
	}
	return nil
}

// save writes what another Host needs to find the sandbox.
func (s *sandbox) save() error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(s.dir, "sandbox.json"), b, 0o600)
}

// load reads the sandbox in dir; one whose file does not read is a leftover.
func load(dir string) (*sandbox, error) {
	b, err := os.ReadFile(filepath.Join(dir, "sandbox.json"))
	if err != nil {
		return nil, err
	}
	s := &sandbox{dir: dir, busy: make(chan struct{}, 1), exit: newStopping()}
	if err := json.Unmarshal(b, s); err != nil {
		return nil, err
	}
	return s, nil
}

// run starts the agent.
func (h *Host) run(ctx context.Context, s *sandbox) error {
	if h.Program == nil {
		s.agent = newAgent(s)
		return nil
	}
	c, err := startChild(ctx, h.Program(s.Request, s.root(), s.socket()), s)
	if err != nil {
		return err
	}
	s.Child = c
	return nil
}

// halt ends everything that runs in the sandbox and waits for it.
func (s *sandbox) halt() {
	s.resume()
	if s.agent != nil {
		s.agent.stop()
	}
	if s.Child != nil {
		s.Child.kill()
	}
	// Looking at every process of the machine is worth it only where one of
	// this sandbox may be.
	if s.agent == nil || s.agent.hasRun() {
		killMarked(s.ID)
	}
	if s.agent != nil {
		s.agent.wait() // for output that only those processes kept open
	}
}

func (s *sandbox) resume() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.paused != nil {
		close(s.paused)
		s.paused = nil
	}
}

// remove ends a sandbox and removes all of it, found in memory or in Dir.
func (h *Host) remove(id session.SandboxID) error {
	h.mu.Lock()
	s := h.sandboxes[id]
	h.mu.Unlock()
	if s == nil {
		if h.Dir == "" || !h.leftover(id) {
			return nil
		}
		dir := filepath.Join(h.Dir, string(id))
		if found, err := load(dir); err == nil {
			s = found
		} else {
			s = &sandbox{ID: id, dir: dir, exit: newStopping()}
		}
	}
	s.exit.set(driver.Exit{Code: -1, Signal: 9})
	s.halt()
	if err := os.RemoveAll(s.dir); err != nil {
		return fmt.Errorf("sandbox %s: %w", id, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.sandboxes, id)
	return nil
}

func (h *Host) leftover(id session.SandboxID) bool {
	if _, _, err := id.Split(); err != nil {
		return false
	}
	_, err := os.Lstat(filepath.Join(h.Dir, string(id)))
	return err == nil
}

// recover finds a sandbox that runs but that this Host does not have yet.
func (h *Host) recover(id session.SandboxID) (*sandbox, error) {
	if s, err := h.get(id); err == nil {
		if !s.exit.stopped() {
			return s, nil
		}
		return nil, kind.Errorf(kind.NotFound, "sandbox %s has stopped", id)
	}
	if h.Dir == "" || !h.leftover(id) {
		return nil, kind.Errorf(kind.NotFound, "sandbox %s does not exist", id)
	}
	s, err := load(filepath.Join(h.Dir, string(id)))
	if err != nil || s.Child == nil || !s.Child.alive() {
		return nil, kind.Errorf(kind.NotFound, "sandbox %s does not run any more", id)
	}
	s.Child.watch(s.exit)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.sandboxes == nil {
		h.sandboxes = map[session.SandboxID]*sandbox{}
	}
	if other := h.sandboxes[id]; other != nil {
		return other, nil
	}
	h.sandboxes[id] = s
	return s, nil
}

// list returns every sandbox, in memory and in Dir.
func (h *Host) list() ([]driver.Found, error) {
	h.mu.Lock()
	found := make([]driver.Found, 0, len(h.sandboxes))
	for id, s := range h.sandboxes {
		found = append(found, driver.Found{ID: id, Owner: s.Request.Owner, Running: !s.exit.stopped()})
	}
	h.mu.Unlock()
	if h.Dir == "" {
		return found, nil
	}
	entries, err := os.ReadDir(h.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		id := session.SandboxID(e.Name())
		if _, _, err := id.Split(); err != nil || slices.ContainsFunc(found, func(f driver.Found) bool { return f.ID == id }) {
			continue
		}
		f := driver.Found{ID: id}
		if s, err := load(filepath.Join(h.Dir, e.Name())); err == nil {
			f.Owner, f.Running = s.Request.Owner, s.Child != nil && s.Child.alive()
		}
		found = append(found, f)
	}
	slices.SortFunc(found, func(a, b driver.Found) int { return strings.Compare(string(a.ID), string(b.ID)) })
	return found, nil
}

// dial connects to the agent; nothing listens on other ports.
func (h *Host) dial(ctx context.Context, id session.SandboxID, port uint16) (net.Conn, error) {
	s, err := h.running(id)
	if err != nil {
		return nil, err
	}
	if port != h.port() {
		return nil, kind.Errorf(kind.Unavailable, "sandbox %s: nothing listens on port %d", id, port)
	}
	if s.agent != nil {
		return s.agent.dial(ctx)
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", s.socket())
	if err != nil && ctx.Err() == nil {
		return nil, kind.Errorf(kind.Unavailable, "sandbox %s: port %d: %w", id, port, err)
	}
	return c, err
}
