package bench

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"bivy/client"
	"bivy/internal/bundle"
	"bivy/internal/poll"
)

const (
	sandboxName   = "host memory of an idle sandbox beyond the guest's own"
	guestName     = "the guest's own memory, agent included"
	daemonName    = "server, idle, without sessions: PSS"
	fileName      = "bivy on disk"
	guestFileName = "bivy-guest on disk"
	idleSandboxes = 20
	// settleTime is how long what has started is left alone: sentries give
	// memory back after a second.
	settleTime = 4 * time.Second
)

// memory measures what idle things hold.
func memory(ctx context.Context, b *bench) ([]Figure, error) {
	figures, err := fileSizes()
	if err != nil {
		return nil, err
	}
	// A server that has done nothing since its start, with everything built.
	if _, err := b.serve(ctx); err != nil {
		return nil, err
	}
	parent := b.server.parent
	if err := b.stopServer(ctx); err != nil {
		return nil, err
	}
	s, err := b.startServer(ctx)
	if err != nil {
		return nil, err
	}
	s.parent = parent
	if s.boxes, err = b.groups.watch(parent); err != nil {
		return nil, err
	}
	if err := poll.Sleep(ctx, settleTime); err != nil {
		return nil, err
	}
	figures = append(figures,
		single(daemonName, "MiB", round(mib(kib(rollup(s.cmd.Process.Pid), "Pss")))),
		single("server, idle, without sessions: private", "MiB", round(mib(private(s.cmd.Process.Pid)))),
		single("server, from start to taking work", "ms", round(ms(s.ready))))
	// One life first: what the first costs once is not what each costs.
	if _, _, err := s.life(ctx, client.CreateSession{}, []string{"/bin/true"}, nil); err != nil {
		return nil, err
	}
	more, err := b.idle(ctx, s)
	return append(figures, more...), err
}

func fileSizes() ([]Figure, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(exe)
	if err != nil {
		return nil, err
	}
	payload, err := bundle.Load()
	if err != nil {
		return nil, err
	}
	guest, err := payload.Open(bundle.Guest)
	if err != nil {
		return nil, err
	}
	const mb = 1e6
	return []Figure{
		single(fileName, "MB", round(float64(info.Size())/mb)),
		single(guestFileName, "MB", round(float64(len(guest))/mb)),
	}, nil
}

func rollup(pid int) string { return fmt.Sprintf("/proc/%d/smaps_rollup", pid) }

// private is the memory of a process that it shares with no other.
func private(pid int) int64 {
	return kib(rollup(pid), "Private_Clean") + kib(rollup(pid), "Private_Dirty")
}

// held is what the server and its sandboxes hold at one moment.
type held struct {
	server, boxes memoryUse
	private       int64 // of the server's process alone
	available     int64 // on the whole machine
}

func (b *bench) held(s *server) held {
	dir, v := b.groups.dir("memory", ""), b.groups.host.Version
	return held{
		server: memoryOf(filepath.Join(dir, "server"), v), boxes: memoryOf(filepath.Join(filepath.Dir(dir), s.parent), v),
		available: meminfo("MemAvailable"), private: private(s.cmd.Process.Pid),
	}
}

// idle measures idle sandboxes.
func (b *bench) idle(ctx context.Context, s *server) ([]Figure, error) {
	if err := poll.Sleep(ctx, settleTime); err != nil {
		return nil, err
	}
	before := b.held(s)
	b.say("starting %d sandboxes to leave idle", idleSandboxes)
	sessions := make([]*client.Session, idleSandboxes)
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.NumCPU())
	for i := range sessions {
		group.Go(func() (err error) {
			sessions[i], err = s.client.CreateSession(groupCtx, client.CreateSession{})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	if err := poll.Sleep(ctx, settleTime); err != nil {
		return nil, err
	}
	after := b.held(s)
	pss, guest, beyond := &series{}, &series{}, &series{}
	var guests int64
	for _, session := range sessions {
		p, g, err := b.box(s, session)
		if err != nil {
			return nil, err
		}
		guests += g
		pss.add(mib(p))
		guest.add(mib(g))
		beyond.add(mib(p - g))
	}
	per := func(bytes int64) float64 { return round(mib(bytes) / idleSandboxes) }
	total := after.server.sum() + after.boxes.sum() - before.server.sum() - before.boxes.sum()
	budgeted := single(sandboxName, "MiB", per(total-guests))
	budgeted.N, budgeted.Note = idleSandboxes, "by cgroups: all that server and sandboxes grew by, less the guests' memory files"
	all := single("host memory of an idle sandbox, all of it, by cgroups", "MiB", per(total))
	machine := single("host memory of an idle sandbox, all of it, by MemAvailable", "MiB", per(before.available-after.available))
	server := single("server's growth for an idle sandbox", "MiB", per(after.private-before.private))
	kernel := single("kernel's memory for an idle sandbox", "MiB", per(after.server.kernel+after.boxes.kernel-before.server.kernel-before.boxes.kernel))
	for _, f := range []*Figure{&all, &machine, &server, &kernel} {
		f.N = idleSandboxes
	}
	machine.Note = "of the whole machine, other processes included"
	seen, err := seenInside(ctx, sessions[0])
	if err != nil {
		return nil, err
	}
	inside := single("agent, as the guest's kernel counts it (VmRSS)", "MiB", round(mib(seen)))
	inside.Note = "counts whole mapped files, which every sandbox shares with the host"
	return []Figure{budgeted, all, machine, pss.figure("PSS of an idle sandbox's processes", "MiB"),
		beyond.figure("PSS of an idle sandbox's processes beyond the guest's own", "MiB"),
		guest.figure(guestName, "MiB"), server, kernel, inside}, s.endAll(ctx)
}

// box is what a sandbox's processes hold, and how much of it is the guest's.
func (b *bench) box(s *server, session *client.Session) (pss, guest int64, err error) {
	mount := filepath.Dir(b.groups.dir("memory", ""))
	slot, err := s.slot(session)
	if err != nil {
		return 0, 0, err
	}
	procs := fact(filepath.Join(mount, s.parent, slot, "cgroup.procs"))
	if procs == "" {
		return 0, 0, fmt.Errorf("sandbox %s has no processes", session.Info.Sandbox)
	}
	for pid := range strings.FieldsSeq(procs) {
		pss += kib("/proc/"+pid+"/smaps_rollup", "Pss")
		guest = max(guest, memoryFile(pid))
	}
	if guest == 0 {
		return 0, 0, fmt.Errorf("sandbox %s has no memory file", session.Info.Sandbox)
	}
	return pss, guest, nil
}

// memoryFile is the size on the host of the file that holds all memory of a
// guest, its writable files included.
func memoryFile(pid string) int64 {
	entries, err := os.ReadDir("/proc/" + pid + "/fd")
	if err != nil {
		return 0 // not a sentry, or gone
	}
	for _, e := range entries {
		path := "/proc/" + pid + "/fd/" + e.Name()
		target, err := os.Readlink(path)
		if err != nil || !strings.HasPrefix(target, "/memfd:runsc-memory") {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(path, &st) == nil {
			return st.Blocks * 512
		}
	}
	return 0
}

// seenInside is the agent's resident memory as commands inside see it.
func seenInside(ctx context.Context, session *client.Session) (int64, error) {
	r, err := session.Run(ctx, client.Command{Argv: []string{"cat", "/proc/1/status"}})
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(r.Stdout)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			n, err := strconv.ParseInt(f[1], 10, 64)
			return n << 10, err
		}
	}
	return 0, fmt.Errorf("no VmRSS in /proc/1/status: %w", io.ErrUnexpectedEOF)
}
