package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/control/client"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"
	runsc "gvisor.dev/gvisor/runsc/sandbox"

	"bivy/internal/cgroup"
	"bivy/internal/driver"
	"bivy/internal/driver/gvisor/bootflags"
	"bivy/internal/kind"
	"bivy/internal/link"
	"bivy/internal/session"
)

// handleVersion is the version of handleState.
const handleVersion = 1

// handleState is what a later process needs and the host does not say.
type handleState struct {
	Slot   string        `json:"slot"`
	Image  string        `json:"image"`
	Limits driver.Limits `json:"limits"` // as started; see limitsFile
}

// sandbox is one incarnation as this process knows it.
type sandbox struct {
	d     *Driver
	id    session.SandboxID
	slot  string // names everything that it has on the host
	group *cgroup.Group

	placed atomic.Bool // all its processes are in the group

	busy   chan struct{}       // holds one token: one operation at a time; guards what follows
	req    driver.StartRequest // without the snapshot
	runsc  *runsc.Sandbox
	wire   atomic.Pointer[link.Link] // read without a turn
	proc   *process
	paused bool
	unsure bool // an earlier process died while it paused this

	ended chan struct{} // closed once the sentry is dead and reaped
	exit  driver.Exit   // valid after ended
}

func newSandbox(d *Driver, slot string, req driver.StartRequest) *sandbox {
	return &sandbox{d: d, id: req.ID, slot: slot, req: req, group: d.host.Group(slot), busy: make(chan struct{}, 1), ended: make(chan struct{})}
}

// acquire waits for the operation in progress; release lets the next one in.
func (s *sandbox) acquire(ctx context.Context) error {
	select {
	case s.busy <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *sandbox) release() { <-s.busy }

// do runs one operation on a running sandbox. When ctx ends first the caller
// gets its error and the operation goes on: when a guest kernel does not
// answer, destroying the sandbox ends the operation.
func (s *sandbox) do(ctx context.Context, op func() error) error {
	if err := s.acquire(ctx); err != nil {
		return err
	}
	if !s.alive() {
		s.release()
		return kind.Errorf(kind.Unavailable, "sandbox %s is not running", s.id)
	}
	done := make(chan error, 1)
	go func() { // ends with the operation, at the latest when the sentry dies
		defer s.release()
		done <- op()
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// orKill runs a part of a start. When ctx ends first the sentry is killed,
// which ends every wait for its answer.
func (s *sandbox) orKill(ctx context.Context, part func() error) error {
	done := make(chan error, 1)
	go func() { done <- part() }() // ends at the latest with the sentry, which is killed below
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	killing, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	for {
		err := s.killUnplaced(killing)
		select {
		case partErr := <-done:
			return errors.Join(ctx.Err(), partErr)
		case <-killing.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(10 * time.Millisecond): // one may just be starting
		}
	}
}

// started reports whether the sandbox has its wire and has not ended; unlike
// alive it may be asked at any time.
func (s *sandbox) started() bool {
	select {
	case <-s.ended:
		return false
	default:
		return s.wire.Load() != nil
	}
}

func (s *sandbox) closeWire() {
	if wire := s.wire.Load(); wire != nil {
		wire.Close()
	}
}

func (s *sandbox) alive() bool {
	select {
	case <-s.ended:
		return false
	default:
		return s.proc != nil
	}
}

// start makes everything of the sandbox; the caller destroys it when it
// fails. Called busy.
func (s *sandbox) start(ctx context.Context, snapshot driver.Source) (driver.Handle, error) {
	bundle := s.d.bundle(s.slot)
	oci := spec(s.req, bundle)
	err := s.d.makeBundle(s.slot, label{Sandbox: s.id, Owner: s.req.Owner})
	if err == nil {
		err = writeBundle(bundle, oci, s.req.Shape)
	}
	if err != nil {
		return driver.Handle{}, hostError(fmt.Errorf("bundle of %s: %w", s.id, err))
	}
	if err := s.group.Create(groupLimits(s.req.Limits)); err != nil {
		return driver.Handle{}, hostError(fmt.Errorf("limits of %s: %w", s.id, err))
	}
	var c *container.Container
	err = s.orKill(ctx, func() (err error) {
		defer s.placeEarly()()
		c, err = container.New(s.d.conf, container.Args{ID: s.slot, Spec: oci, BundleDir: bundle})
		return err
	})
	if err != nil {
		return driver.Handle{}, hostError(fmt.Errorf("sandbox %s: %w", s.id, err))
	}
	s.runsc = c.Sandbox
	if err := s.watch(c.Sandbox.Pid.Load(), true); err != nil {
		return driver.Handle{}, err
	}
	// Before anything of the guest runs; processes made later start inside.
	if err := s.group.PlaceTree(s.proc.Pid); err != nil {
		return driver.Handle{}, fmt.Errorf("limits of %s: %w", s.id, err)
	}
	s.placed.Store(true)
	if err := s.orKill(ctx, func() error { return s.run(c, snapshot) }); err != nil {
		return driver.Handle{}, err
	}
	if err := s.offerStubs(); err != nil {
		return driver.Handle{}, err
	}
	if err := ctx.Err(); err != nil {
		return driver.Handle{}, err
	}
	state, err := json.Marshal(handleState{Slot: s.slot, Image: s.req.Image, Limits: s.req.Limits})
	if err != nil {
		return driver.Handle{}, err
	}
	return driver.Handle{Sandbox: s.id, Owner: s.req.Owner, Driver: Name, Version: handleVersion, State: state}, nil
}

// offerStubs makes guest processes the kernel's choice when the memory limit
// is hit, rather than the sentry: the process that took too much is lost, not
// the sandbox. Guest memory counts for the stub process that a guest process
// runs in; those made later inherit the score.
func (s *sandbox) offerStubs() error {
	tree, err := cgroup.Tree(s.proc.Pid)
	if err != nil {
		return err
	}
	for _, pid := range tree[1:] {
		err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(stubScore), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("stub %d: %w", pid, err)
		}
	}
	return nil
}

// stubScore is short of 1000, the score of what the kernel kills first of all.
const stubScore = "900"

// openLink takes the host's end of the wire out of the sentry, which made it.
func (s *sandbox) openLink() error {
	fd, err := s.proc.take(bootflags.WireHostFD)
	if err != nil {
		return fmt.Errorf("link of %s: %w", s.id, err)
	}
	link.Widen(fd)
	o := link.Options{Log: s.d.log.With("sandbox", s.id)}
	if out := s.d.opt.Outbound; out != nil {
		o.Outbound = func(ctx context.Context, f *link.Flow) { out.Flow(ctx, s.id, f) }
	}
	wire, err := link.Open(fd, o)
	if err == nil {
		s.wire.Store(wire)
	}
	return err
}

// run starts the guest: from the snapshot, or by booting it.
func (s *sandbox) run(c *container.Container, snapshot driver.Source) error {
	if err := s.openLink(); err != nil {
		return err
	}
	fd, err := s.proc.take(bootflags.WireGuestFD)
	if err != nil {
		return fmt.Errorf("link of %s: %w", s.id, err)
	}
	link.Widen(fd)
	guestEnd := os.NewFile(uintptr(fd), "guest's end of the link")
	defer guestEnd.Close()
	conn, err := client.ConnectTo(c.Sandbox.ControlSocketPath)
	if err != nil {
		return fmt.Errorf("control socket of %s: %w", s.id, err)
	}
	defer conn.Close()
	// What Container.Start and Container.Restore do, but with our wire in
	// place of their network, and with the files of any Source.
	if err := conn.Call(boot.ContMgrSetNetworkArgs, networkArgs(guestEnd, snapshot != nil), nil); err != nil {
		return fmt.Errorf("link of %s: %w", s.id, err)
	}
	if snapshot != nil {
		if err := restore(conn, snapshot); err != nil {
			return fmt.Errorf("restore %s: %w", s.id, s.explain(err))
		}
		return nil
	}
	if err := conn.Call(boot.ContMgrRootContainerStart, &c.ID, nil); err != nil {
		return fmt.Errorf("start %s: %w", s.id, s.explain(err))
	}
	return nil
}

// explain adds what the kernel's memory limit did to a failure it explains.
func (s *sandbox) explain(err error) error {
	if st, statErr := s.group.Stats(); statErr == nil && st.OOMKills > 0 {
		return kind.Errorf(kind.Exhausted, "its memory limit of %d MiB is too small to start in: %w", s.req.Limits.MemoryBytes>>20, err).
			WithField("resources.memory_mib").WithHint("allow more memory")
	}
	return err
}

// hostError gives an error of the host the kind of its cause.
func hostError(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOMEM) {
		return kind.Errorf(kind.Exhausted, "%w", err).WithHint("free disk, memory or processes on this host")
	}
	return err
}

// networkArgs describes the guest's interfaces: a loopback, and eth0 on the
// wire.
func networkArgs(guestEnd *os.File, restore bool) *boot.CreateLinksAndRoutesArgs {
	gateway := link.Gateway.AsSlice()
	return &boot.CreateLinksAndRoutesArgs{
		FilePayload:   urpc.FilePayload{Files: []*os.File{guestEnd}},
		LoopbackLinks: []boot.LoopbackLink{boot.DefaultLoopbackLink},
		FDBasedLinks: []boot.FDBasedLink{{
			Name: "eth0", MTU: link.MTU, NumChannels: 1, ProcessorsPerChannel: 1,
			Addresses:         []boot.IPWithPrefix{{Address: link.Guest.AsSlice(), PrefixLen: link.PrefixBits}},
			Routes:            []boot.Route{wireRoute()},
			RXChecksumOffload: true, TXChecksumOffload: true,
			// Without a queue a full wire makes gVisor try a send again for
			// ever, with what is left of it: nothing.
			QDisc: config.QDiscFIFO,
		}},
		Defaultv4Gateway: boot.DefaultRoute{Name: "eth0", Route: boot.Route{Destination: everywhere(), Gateway: gateway}},
		IsRestore:        restore,
	}
}

// destroy removes everything of the sandbox and proves it; it may be called
// in any state and again. Called busy.
func (s *sandbox) destroy(ctx context.Context) error {
	s.closeWire()
	ctx, cancel := context.WithTimeout(ctx, killLimit)
	defer cancel()
	if err := s.killAll(ctx); err != nil {
		return err // it lives: its slot stays taken
	}
	var errs []error
	errs = append(errs, s.removeState(), s.group.Remove())
	// Last: as long as the bundle is there, the id is taken and listed.
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return s.d.removeBundle(s.slot)
}

// killLimit bounds how long a kill waits for the kernel.
const killLimit = 30 * time.Second

// killAll kills by group and, for a sandbox whose start was cut short before
// it was in its group, by the marks on the process itself.
func (s *sandbox) killAll(ctx context.Context) error {
	if err := s.killUnplaced(ctx); err != nil {
		return err
	}
	if err := s.group.Kill(ctx); err != nil {
		return err
	}
	if s.proc == nil {
		return nil
	}
	select { // reaped too: no zombie is left behind
	case <-s.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("sandbox %s: process %d does not end: %w", s.id, s.proc.Pid, ctx.Err())
	}
}

// killUnplaced kills sentries that are not in the group. It looks at every
// process of the host, and only while there may be such a sentry.
func (s *sandbox) killUnplaced(ctx context.Context) error {
	if s.placed.Load() {
		return nil
	}
	found, err := s.d.unplaced(s.slot)
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range found {
		errs = append(errs, p.kill(ctx))
	}
	return errors.Join(errs...)
}

// removeState deletes what runsc keeps for the sandbox.
func (s *sandbox) removeState() error {
	// As runsc names them; a slot is letters, digits and a hyphen, so that no
	// pattern can match more.
	var errs []error
	for _, pattern := range []string{s.slot + "_sandbox:" + s.slot + ".*", "runsc-" + s.slot + ".sock"} {
		paths, err := filepath.Glob(filepath.Join(s.d.stateDir(), pattern))
		errs = append(errs, err)
		for _, p := range paths {
			errs = append(errs, os.RemoveAll(p))
		}
	}
	return errors.Join(errs...)
}
