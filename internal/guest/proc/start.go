package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"bivy/internal/argv"
	"bivy/internal/guest/accounts"
	"bivy/internal/guest/wire"
	pb "bivy/internal/guest/wire/gen/process"
)

// start starts the process of msg as u, and subscribes to its output before it
// can write any.
func (s *Service) start(ctx context.Context, u accounts.User, msg *pb.StartRequest) (*Process, *subscriber, error) {
	run, err := s.prepare(u, msg)
	if err != nil {
		return nil, nil, err
	}
	if err := s.admit(); err != nil {
		return nil, nil, err
	}
	p, err := s.launch(u, msg, run)
	if err != nil {
		s.mu.Lock()
		s.starting--
		s.mu.Unlock()
		return nil, nil, err
	}
	sub := p.out.subscribe()
	if deadline, ok := ctx.Deadline(); ok {
		p.limit(deadline)
	}
	s.mu.Lock()
	s.starting--
	s.running[p.pid] = p
	s.mu.Unlock()
	// Ends with the process; nothing waits for it, because the agent's end kills
	// all processes.
	go p.run(s.finished)
	return p, sub, nil
}

// admit counts one more process that is starting, or fails at MaxProcesses.
func (s *Service) admit() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.running)+s.starting >= MaxProcesses {
		return wire.NewError(connect.CodeResourceExhausted, wire.ReasonLimit, fmt.Errorf("limit of %d running processes reached", MaxProcesses))
	}
	s.starting++
	return nil
}

// command is a start request that has been checked and resolved.
type command struct {
	path string
	argv []string
	env  []string
	cwd  string
}

func invalid(why wire.Reason, format string, args ...any) error {
	return wire.NewError(connect.CodeInvalidArgument, why, fmt.Errorf(format, args...))
}

// prepare checks msg and resolves the directory and the program with the rights
// of the user.
func (s *Service) prepare(u accounts.User, msg *pb.StartRequest) (command, error) {
	cfg := msg.GetProcess()
	what := argv.Command{Argv: append(argv.Argv{cfg.GetCmd()}, cfg.GetArgs()...), Env: cfg.GetEnvs(), Dir: cfg.GetCwd()}
	if cfg.GetEscaped() {
		what = wire.UnescapeCommand(what)
	}
	if err := what.Check(); err != nil {
		return command{}, wire.CommandError(err)
	}
	all := s.resolver.Env(u, what.Env)
	if err := argv.CheckProcessEnv("env", all); err != nil {
		return command{}, wire.CommandError(err)
	}
	dir, err := s.resolver.Path(u, cfg.GetCwd()) // Path unescapes it
	if err != nil {
		return command{}, invalid(wire.ReasonCwd, "cwd: %w", err)
	}
	c := command{argv: what.Argv, cwd: dir}
	for k, v := range all {
		c.env = append(c.env, k+"="+v)
	}
	slices.Sort(c.env)
	err = u.Do(func() error {
		if err := checkDir(dir); err != nil {
			return err
		}
		c.path, err = lookPath(what.Argv[0], dir, all["PATH"])
		return err
	})
	return c, err
}

func checkDir(dir string) error {
	st, err := os.Stat(dir)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return invalid(wire.ReasonCwd, "cwd '%s' does not exist", wire.Escape(dir))
	case errors.Is(err, os.ErrPermission):
		return invalid(wire.ReasonCwd, "cwd '%s': permission denied", wire.Escape(dir))
	case err != nil:
		return invalid(wire.ReasonCwd, "cwd '%s': %w", wire.Escape(dir), err)
	case !st.IsDir():
		return invalid(wire.ReasonCwd, "cwd '%s' is not a directory", wire.Escape(dir))
	}
	if unix.Faccessat(unix.AT_FDCWD, dir, unix.X_OK, unix.AT_EACCESS) != nil {
		return invalid(wire.ReasonCwd, "cwd '%s': permission denied", wire.Escape(dir))
	}
	return nil
}

// lookPath finds a program as a shell does: names without a slash in path, others
// relative to dir. The reason of its error differs for a file that cannot be
// executed and one that does not exist, like a shell's exit codes 126 and 127.
func lookPath(cmd, dir, path string) (string, error) {
	var found string // a file of that name that cannot be executed
	try := func(p string) bool {
		if !filepath.IsAbs(p) {
			p = filepath.Join(dir, p)
		}
		st, err := os.Stat(p)
		if err != nil {
			if errors.Is(err, os.ErrPermission) && strings.Contains(cmd, "/") {
				found = p
			}
			return false
		}
		found = p
		return st.Mode().IsRegular() && unix.Faccessat(unix.AT_FDCWD, p, unix.X_OK, unix.AT_EACCESS) == nil
	}
	if strings.Contains(cmd, "/") {
		if try(cmd) {
			return found, nil
		}
	} else {
		for _, d := range filepath.SplitList(path) {
			if d == "" {
				d = "."
			}
			if try(filepath.Join(d, cmd)) {
				return found, nil
			}
		}
	}
	if found != "" {
		return "", invalid(wire.ReasonCommandNotExecutable, "cmd '%s' cannot be executed: permission denied", wire.Escape(cmd))
	}
	return "", invalid(wire.ReasonCommandNotFound, "cmd '%s' does not exist", wire.Escape(cmd))
}

// stdio holds the descriptors of a child's standard streams: the child's ends and
// the agent's.
type stdio struct {
	files  []uintptr  // the child's 0, 1 and 2
	child  []int      // to be closed in the parent after the fork
	parent []*os.File // to be closed when the child could not be started
}

func (l *stdio) closeChild() {
	for _, fd := range l.child {
		_ = unix.Close(fd) // closing a pipe end does not fail
	}
}

func (l *stdio) closeParent() {
	for _, f := range l.parent {
		_ = f.Close()
	}
}

// pipe creates a pipe and returns the agent's end of it and the child's
// descriptor. The agent reads from it if read is set, otherwise it writes.
func (l *stdio) pipe(read bool) (*os.File, int, error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, -1, os.NewSyscallError("pipe2", err)
	}
	own, child := fds[0], fds[1]
	if !read {
		own, child = child, own
	}
	l.child = append(l.child, child)
	// Only the agent's end is non-blocking. The ends do not share file status
	// flags, and programs expect theirs to block.
	if err := unix.SetNonblock(own, true); err != nil {
		_ = unix.Close(own)
		return nil, -1, os.NewSyscallError("fcntl", err)
	}
	f := os.NewFile(uintptr(own), "pipe") //nolint:gosec // a descriptor is small
	l.parent = append(l.parent, f)
	return f, child, nil
}

// launch creates the standard streams and starts the process.
func (s *Service) launch(u accounts.User, msg *pb.StartRequest, run command) (*Process, error) {
	p := &Process{
		tag: msg.Tag, config: msg.GetProcess(), reaper: s.reaper,
		input:  make(chan struct{}, 1),
		exited: make(chan struct{}), done: make(chan struct{}),
	}
	p.out.pool = &s.pool
	var l stdio
	defer l.closeChild()
	sys := &syscall.SysProcAttr{Setsid: true}
	var err error
	if msg.Pty != nil {
		err = p.attachTerminal(&l, u, msg.GetPty().GetSize())
		sys.Setctty = true // descriptor 0
	} else {
		err = p.attachPipes(&l, msg.Stdin == nil || *msg.Stdin)
	}
	if err != nil {
		l.closeParent()
		return nil, startError(run, err)
	}
	sys.Credential = &syscall.Credential{Uid: u.UID, Gid: u.GID, Groups: u.Groups}
	attr := &syscall.ProcAttr{Dir: run.cwd, Env: run.env, Files: l.files, Sys: sys}
	p.pid, p.mark, err = s.spawn(run, attr, p.onExit)
	if err != nil {
		l.closeParent()
		return nil, startError(run, err)
	}
	return p, nil
}

// spawn retries while the program's file is open for writing (ETXTBSY): between
// its fork and its exec, another child has a copy of the descriptor through which
// the file was uploaded.
func (s *Service) spawn(run command, attr *syscall.ProcAttr, exited func(unix.WaitStatus)) (int, uint64, error) {
	for wait := time.Millisecond; ; wait *= 2 {
		pid, mark, err := s.reaper.spawn(run.path, run.argv, attr, exited)
		if !errors.Is(err, unix.ETXTBSY) || wait > 64*time.Millisecond {
			return pid, mark, err
		}
		time.Sleep(wait)
	}
}

func (p *Process) attachTerminal(l *stdio, u accounts.User, size *pb.PTY_Size) error {
	master, slave, err := openPTY(u.UID, size)
	if err != nil {
		return err
	}
	p.pty, p.outputs = master, []*os.File{master}
	l.parent = append(l.parent, master)
	l.child = append(l.child, slave)
	l.files = []uintptr{uintptr(slave), uintptr(slave), uintptr(slave)} //nolint:gosec // a descriptor is small
	return nil
}

func (p *Process) attachPipes(l *stdio, stdin bool) error {
	var in int
	var err error
	if stdin {
		p.stdin, in, err = l.pipe(false)
	} else if in, err = unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0); err == nil {
		l.child = append(l.child, in)
	}
	if err != nil {
		return err
	}
	l.files = []uintptr{uintptr(in)} //nolint:gosec // a descriptor is small
	for range 2 {
		f, child, err := l.pipe(true)
		if err != nil {
			return err
		}
		p.outputs = append(p.outputs, f)
		l.files = append(l.files, uintptr(child)) //nolint:gosec // a descriptor is small
	}
	return nil
}

// startError turns an error of fork or exec into the one for the client.
func startError(run command, err error) error {
	cmd := wire.Escape(run.argv[0])
	switch {
	case errors.Is(err, unix.ENOENT):
		// The file itself exists: lookPath found it.
		return invalid(wire.ReasonCommandNotExecutable, "cmd '%s' cannot be executed: its interpreter does not exist", cmd)
	case errors.Is(err, unix.ENOEXEC):
		return invalid(wire.ReasonCommandNotExecutable, "cmd '%s' cannot be executed: unknown executable format", cmd)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM), errors.Is(err, unix.ETXTBSY), errors.Is(err, unix.ELIBBAD), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return invalid(wire.ReasonCommandNotExecutable, "cmd '%s' cannot be executed: %w", cmd, err)
	case errors.Is(err, unix.E2BIG):
		return invalid(wire.ReasonArgs, "args and envs together exceed the kernel's limit")
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOSPC):
		return wire.NewError(connect.CodeResourceExhausted, wire.ReasonLimit, fmt.Errorf("start '%s': %w", cmd, err))
	}
	return connect.NewError(connect.CodeInternal, fmt.Errorf("start '%s': %w", cmd, err))
}
