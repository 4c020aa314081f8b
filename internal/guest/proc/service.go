package proc

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"bivy/internal/guest/accounts"
	"bivy/internal/guest/wire"
	pb "bivy/internal/guest/wire/gen/process"
)

// Limits of the service.
const (
	// MaxProcesses is how many processes may run through the service at once.
	MaxProcesses = 4096
	// maxEnded is how many ended processes are kept for later Connect calls.
	maxEnded = 1024
	// keepalive is the default interval of keep-alive events.
	keepalive = 90 * time.Second
)

// Service implements the process service of package wire.
type Service struct {
	resolver *accounts.Resolver
	reaper   *Reaper
	log      *slog.Logger
	pool     chunkPool

	mu       sync.Mutex
	running  map[int]*Process
	starting int
	ended    []*Process // oldest first
}

// NewService returns a service whose processes reaper waits for.
func NewService(resolver *accounts.Resolver, reaper *Reaper, log *slog.Logger) *Service {
	return &Service{resolver: resolver, reaper: reaper, log: log, running: map[int]*Process{}}
}

// Username returns the user that a request names in HTTP Basic authentication
// without a password, or "".
func Username(h http.Header) (string, error) {
	value := h.Get("Authorization")
	scheme, credentials, _ := strings.Cut(value, " ")
	if value == "" || !strings.EqualFold(scheme, "Basic") {
		return "", nil
	}
	text, err := base64.StdEncoding.DecodeString(strings.TrimSpace(credentials))
	name, _, ok := strings.Cut(string(text), ":")
	if err != nil || !ok {
		return "", wire.NewError(connect.CodeUnauthenticated, wire.ReasonUser, errors.New("the Authorization header is malformed"))
	}
	return name, nil
}

// User resolves the user of a request to an account.
func User(resolver *accounts.Resolver, h http.Header) (accounts.User, error) {
	name, err := Username(h)
	if err != nil {
		return accounts.User{}, err
	}
	u, err := resolver.User(name)
	var unknown *accounts.UnknownError
	if errors.As(err, &unknown) {
		return u, wire.NewError(connect.CodeUnauthenticated, wire.ReasonUser, err)
	}
	if err != nil {
		return u, connect.NewError(connect.CodeInternal, err)
	}
	return u, nil
}

// List implements the service.
func (s *Service) List(context.Context, *connect.Request[pb.ListRequest]) (*connect.Response[pb.ListResponse], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	res := &pb.ListResponse{}
	for _, p := range s.running {
		res.Processes = append(res.Processes, p.info())
	}
	slices.SortFunc(res.Processes, func(a, b *pb.ProcessInfo) int { return int(a.Pid) - int(b.Pid) })
	return connect.NewResponse(res), nil
}

// Start implements the service. The call's timeout is the lifetime limit of
// the process, so it does not end the stream; the end of the process does.
func (s *Service) Start(ctx context.Context, req *connect.Request[pb.StartRequest], stream *connect.ServerStream[pb.StartResponse]) error {
	u, err := User(s.resolver, req.Header())
	if err != nil {
		return err
	}
	p, sub, err := s.start(ctx, u, req.Msg)
	if err != nil {
		return err
	}
	defer p.out.unsubscribe(sub)
	res := &pb.StartResponse{}
	end, err := s.follow(ctx, p, sub, req.Header(), true, func(e *pb.ProcessEvent) error {
		res.Event = e
		return stream.Send(res)
	})
	if err != nil {
		return err
	}
	if p.expired() {
		return wire.NewError(connect.CodeDeadlineExceeded, wire.ReasonTimeout, errors.New("the process exceeded its timeout and was killed"))
	}
	return stream.Send(&pb.StartResponse{Event: end})
}

// Connect implements the service. The call's timeout limits this stream only.
func (s *Service) Connect(ctx context.Context, req *connect.Request[pb.ConnectRequest], stream *connect.ServerStream[pb.ConnectResponse]) error {
	p, err := s.find(req.Msg.GetProcess(), true)
	if err != nil {
		return err
	}
	sub := p.out.subscribe()
	defer p.out.unsubscribe(sub)
	res := &pb.ConnectResponse{}
	end, err := s.follow(ctx, p, sub, req.Header(), false, func(e *pb.ProcessEvent) error {
		res.Event = e
		return stream.Send(res)
	})
	if err != nil {
		return err
	}
	return stream.Send(&pb.ConnectResponse{Event: end})
}

// follow sends the start of p and its output, and returns the end.
func (s *Service) follow(ctx context.Context, p *Process, sub *subscriber, h http.Header, lifetime bool, send func(*pb.ProcessEvent) error) (*pb.ProcessEvent, error) {
	err := send(&pb.ProcessEvent{Event: &pb.ProcessEvent_Start{Start: &pb.ProcessEvent_StartEvent{Pid: uint32(p.pid)}}}) //nolint:gosec // process ids are positive
	if err != nil {
		return nil, err
	}
	interval := Keepalive(h)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	cancelled := ctx.Done()
	for {
		select {
		case c, ok := <-sub.chunks:
			if !ok {
				return &pb.ProcessEvent{Event: &pb.ProcessEvent_End{End: p.end}}, nil
			}
			err := send(c.event())
			s.pool.release(c)
			if err != nil {
				return nil, err
			}
			tick.Reset(interval)
		case <-tick.C:
			if err := send(&pb.ProcessEvent{Event: &pb.ProcessEvent_Keepalive{Keepalive: &pb.ProcessEvent_KeepAlive{}}}); err != nil {
				return nil, err
			}
		case <-cancelled:
			if lifetime && errors.Is(ctx.Err(), context.DeadlineExceeded) {
				cancelled = nil // the process is being killed; its end event follows
				continue
			}
			return nil, ctx.Err()
		}
	}
}

// Keepalive returns the interval at which a client wants keep-alive events.
func Keepalive(h http.Header) time.Duration {
	seconds, err := strconv.Atoi(h.Get(wire.HeaderKeepalive))
	if err != nil || seconds <= 0 {
		return keepalive
	}
	return time.Duration(min(seconds, 3600)) * time.Second
}

// Update implements the service.
func (s *Service) Update(_ context.Context, req *connect.Request[pb.UpdateRequest]) (*connect.Response[pb.UpdateResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if size := req.Msg.GetPty().GetSize(); size != nil {
		if err := p.resize(size); err != nil {
			return nil, inputError(err)
		}
	}
	return connect.NewResponse(&pb.UpdateResponse{}), nil
}

// SendInput implements the service. It returns when all input has been written.
func (s *Service) SendInput(ctx context.Context, req *connect.Request[pb.SendInputRequest]) (*connect.Response[pb.SendInputResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if err := writeInput(ctx, p, req.Msg.GetInput()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.SendInputResponse{}), nil
}

// StreamInput implements the service.
func (s *Service) StreamInput(ctx context.Context, stream *connect.ClientStream[pb.StreamInputRequest]) (*connect.Response[pb.StreamInputResponse], error) {
	var p *Process
	for stream.Receive() {
		switch e := stream.Msg().Event.(type) {
		case *pb.StreamInputRequest_Start:
			if p != nil {
				return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("start: sent more than once"))
			}
			var err error
			if p, err = s.find(e.Start.GetProcess(), false); err != nil {
				return nil, err
			}
		case *pb.StreamInputRequest_Data:
			if p == nil {
				return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("start: must be sent first"))
			}
			if err := writeInput(ctx, p, e.Data.GetInput()); err != nil {
				return nil, err
			}
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.StreamInputResponse{}), nil
}

// writeInput writes one input message to p.
func writeInput(ctx context.Context, p *Process, input *pb.ProcessInput) error {
	var err error
	switch in := input.GetInput().(type) {
	case *pb.ProcessInput_Stdin:
		err = p.write(ctx, in.Stdin, false)
	case *pb.ProcessInput_Pty:
		err = p.write(ctx, in.Pty, true)
	default:
		return connect.NewError(connect.CodeInvalidArgument, errors.New("input: neither stdin nor pty is set"))
	}
	return inputError(err)
}

func inputError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, errNoStdin), errors.Is(err, errIsTerminal), errors.Is(err, errNotTerminal):
		return wire.NewError(connect.CodeFailedPrecondition, wire.ReasonStdin, err)
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.EIO), errors.Is(err, fs.ErrClosed):
		return wire.NewError(connect.CodeFailedPrecondition, wire.ReasonStdin, errors.New("the process has closed its input"))
	}
	return connect.NewError(connect.CodeInternal, err)
}

// CloseStdin implements the service.
func (s *Service) CloseStdin(ctx context.Context, req *connect.Request[pb.CloseStdinRequest]) (*connect.Response[pb.CloseStdinResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if err := p.closeStdin(ctx); err != nil {
		return nil, inputError(err)
	}
	return connect.NewResponse(&pb.CloseStdinResponse{}), nil
}

// SendSignal implements the service.
func (s *Service) SendSignal(_ context.Context, req *connect.Request[pb.SendSignalRequest]) (*connect.Response[pb.SendSignalResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	sig := req.Msg.GetSignal()
	if sig <= 0 || sig > pb.Signal_SIGNAL_SIGSYS {
		return nil, connect.NewError(connect.CodeUnimplemented, fmt.Errorf("signal: unsupported signal %d", sig))
	}
	switch err := p.signal(unix.Signal(sig)); {
	case errors.Is(err, unix.ESRCH):
		return nil, noProcess(req.Msg.GetProcess())
	case err != nil:
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return connect.NewResponse(&pb.SendSignalResponse{}), nil
}

// find returns the process that a selector names. With late it also finds
// processes that ended less than wire.Retention ago.
func (s *Service) find(sel *pb.ProcessSelector, late bool) (*Process, error) {
	var match func(*Process) bool
	switch by := sel.GetSelector().(type) {
	case *pb.ProcessSelector_Pid:
		match = func(p *Process) bool { return p.pid == int(by.Pid) }
	case *pb.ProcessSelector_Tag:
		match = func(p *Process) bool { return p.tag != nil && *p.tag == by.Tag }
	default:
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("process: neither pid nor tag is set"))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.running {
		if match(p) {
			return p, nil
		}
	}
	if late {
		for _, p := range slices.Backward(s.ended) {
			if match(p) {
				return p, nil
			}
		}
	}
	return nil, noProcess(sel)
}

func noProcess(sel *pb.ProcessSelector) error {
	which := strconv.FormatUint(uint64(sel.GetPid()), 10)
	if tag, ok := sel.GetSelector().(*pb.ProcessSelector_Tag); ok {
		which = strconv.Quote(tag.Tag)
	}
	return wire.NewError(connect.CodeNotFound, wire.ReasonNoProcess, fmt.Errorf("process %s is not running", which))
}

// finished moves p from the running to the ended processes and removes it after
// wire.Retention.
func (s *Service) finished(p *Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.running, p.pid)
	p.config = nil // it may be large, and only running processes are listed
	s.ended = append(s.ended, p)
	if len(s.ended) > maxEnded {
		s.ended = slices.Delete(s.ended, 0, len(s.ended)-maxEnded)
	}
	time.AfterFunc(wire.Retention, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.ended = slices.DeleteFunc(s.ended, func(e *Process) bool { return e == p })
	})
}

// Running returns how many processes run through the service.
func (s *Service) Running() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.running)
}

// KillAll ends every process started through the service, with its tree.
func (s *Service) KillAll() {
	s.mu.Lock()
	all := make([]*Process, 0, len(s.running))
	for _, p := range s.running {
		all = append(all, p)
	}
	s.mu.Unlock()
	for _, p := range all {
		p.kill()
	}
}
