package files

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"connectrpc.com/connect"

	"bivy/internal/guest/accounts"
	"bivy/internal/guest/proc"
	"bivy/internal/guest/watch"
	"bivy/internal/guest/wire"
	pb "bivy/internal/guest/wire/gen/filesystem"
)

const (
	// MaxWatchers is how many watchers may exist, streaming and polled together.
	MaxWatchers = 64
	// maxPolled is how many events a polled watcher keeps between two polls.
	maxPolled = 1 << 14
	// maxIdle is how long after its last poll a polled watcher may be removed
	// to make room for a new one.
	maxIdle = 10 * time.Minute
)

// watchers counts all watchers and keeps the polled ones.
type watchers struct {
	mu     sync.Mutex
	count  int
	polled map[string]*poller
}

// acquire counts one more watcher, or fails at MaxWatchers.
func (w *watchers) acquire() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.count >= MaxWatchers {
		// Remove watchers that their clients no longer poll.
		for id, p := range w.polled {
			if p.idle() > maxIdle {
				delete(w.polled, id)
				p.close()
				w.count--
			}
		}
	}
	if w.count >= MaxWatchers {
		return wire.NewError(connect.CodeResourceExhausted, wire.ReasonLimit, fmt.Errorf("limit of %d watchers reached", MaxWatchers))
	}
	w.count++
	return nil
}

func (w *watchers) release() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.count--
}

// dirWatcher is one watcher and what is needed to describe its events.
type dirWatcher struct {
	*watch.Watcher
	service *Service
	user    accounts.User
	root    string
	entry   bool
}

// watchRequest has the fields that WatchDir and CreateWatcher requests share.
type watchRequest interface {
	// GetPath returns the directory to watch.
	GetPath() string
	// GetRecursive reports whether directories below it are watched too.
	GetRecursive() bool
	// GetIncludeEntry reports whether events describe the file.
	GetIncludeEntry() bool
	// GetAllowNetworkMounts permits file systems whose changes by other
	// machines are not seen.
	GetAllowNetworkMounts() bool
}

// open starts a watcher. The caller has called acquire.
func (s *Service) open(req connect.AnyRequest, want watchRequest) (*dirWatcher, error) {
	u, path, err := s.resolve(req, want.GetPath())
	if err != nil {
		return nil, err
	}
	err = u.Do(func() error {
		st, err := os.Stat(path)
		if err != nil {
			return err
		}
		if !st.IsDir() {
			return wire.NewError(connect.CodeInvalidArgument, wire.ReasonPath, fmt.Errorf("path '%s' is not a directory", wire.Escape(path)))
		}
		network, err := watch.IsNetwork(path)
		if err == nil && network && !want.GetAllowNetworkMounts() {
			return wire.NewError(connect.CodeInvalidArgument, wire.ReasonPath, fmt.Errorf("path '%s' is on a network file system, where changes made elsewhere are not seen", wire.Escape(path)))
		}
		return err
	})
	if err != nil {
		return nil, pathError(path, err)
	}
	w, err := watch.New(u, path, want.GetRecursive())
	if errors.Is(err, watch.ErrLost) {
		return nil, wire.NewError(connect.CodeResourceExhausted, wire.ReasonLimit, fmt.Errorf("path '%s' has more than %d directories to watch", wire.Escape(path), watch.MaxDirs))
	}
	if err != nil {
		return nil, pathError(path, err)
	}
	return &dirWatcher{Watcher: w, service: s, user: u, root: path, entry: want.GetIncludeEntry()}, nil
}

// message returns the message for an event. It includes the entry if the request
// asks for it and the file still exists.
func (w *dirWatcher) message(e watch.Event) *pb.FilesystemEvent {
	m := &pb.FilesystemEvent{Name: wire.Escape(e.Name)}
	switch e.Kind {
	case watch.Create:
		m.Type = pb.EventType_EVENT_TYPE_CREATE
	case watch.Write:
		m.Type = pb.EventType_EVENT_TYPE_WRITE
	case watch.Chmod:
		m.Type = pb.EventType_EVENT_TYPE_CHMOD
	case watch.Remove:
		m.Type = pb.EventType_EVENT_TYPE_REMOVE
		return m
	case watch.Rename:
		m.Type = pb.EventType_EVENT_TYPE_RENAME
		return m
	}
	if w.entry {
		if entry, err := w.service.entry(w.user, filepath.Join(w.root, e.Name)); err == nil {
			m.Entry = entry
		}
	}
	return m
}

func watchError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, watch.ErrLost):
		return wire.NewError(connect.CodeResourceExhausted, wire.ReasonLimit, err)
	}
	return connect.NewError(connect.CodeInternal, err)
}

// WatchDir implements the service.
func (s *Service) WatchDir(ctx context.Context, req *connect.Request[pb.WatchDirRequest], stream *connect.ServerStream[pb.WatchDirResponse]) error {
	if err := s.watchers.acquire(); err != nil {
		return err
	}
	defer s.watchers.release()
	w, err := s.open(req, req.Msg)
	if err != nil {
		return err
	}
	defer w.Close()
	err = stream.Send(&pb.WatchDirResponse{Event: &pb.WatchDirResponse_Start{Start: &pb.WatchDirResponse_StartEvent{}}})
	if err != nil {
		return err
	}
	interval := proc.Keepalive(req.Header())
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		res := &pb.WatchDirResponse{}
		select {
		case e, ok := <-w.Events:
			if !ok {
				return watchError(w.Err())
			}
			res.Event = &pb.WatchDirResponse_Filesystem{Filesystem: w.message(e)}
			tick.Reset(interval)
		case <-tick.C:
			res.Event = &pb.WatchDirResponse_Keepalive{Keepalive: &pb.WatchDirResponse_KeepAlive{}}
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := stream.Send(res); err != nil {
			return err
		}
	}
}

// poller keeps the events of a watcher until they are lastPoll for.
type poller struct {
	watcher *dirWatcher

	mu       sync.Mutex
	events   []*pb.FilesystemEvent
	err      error
	lastPoll time.Time
}

// run collects events until the watcher ends.
func (p *poller) run() {
	for e := range p.watcher.Events {
		m := p.watcher.message(e)
		p.mu.Lock()
		full := len(p.events) >= maxPolled
		if full {
			p.events, p.err = nil, watch.ErrLost
		} else {
			p.events = append(p.events, m)
		}
		p.mu.Unlock()
		if full {
			p.close()
			return
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = p.watcher.Err()
	}
}

// drain returns the events since the last call.
func (p *poller) drain() ([]*pb.FilesystemEvent, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lastPoll = time.Now()
	if len(p.events) == 0 && p.err != nil {
		return nil, p.err
	}
	events := p.events
	p.events = nil
	return events, nil
}

func (p *poller) idle() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Since(p.lastPoll)
}

func (p *poller) close() {
	_ = p.watcher.Close() // the watcher is not used any more
}

// CreateWatcher implements the service.
func (s *Service) CreateWatcher(_ context.Context, req *connect.Request[pb.CreateWatcherRequest]) (*connect.Response[pb.CreateWatcherResponse], error) {
	if err := s.watchers.acquire(); err != nil {
		return nil, err
	}
	w, err := s.open(req, req.Msg)
	if err != nil {
		s.watchers.release()
		return nil, err
	}
	p := &poller{watcher: w, lastPoll: time.Now()}
	id := rand.Text()
	s.watchers.mu.Lock()
	s.watchers.polled[id] = p
	s.watchers.mu.Unlock()
	go p.run() // ends with the watcher
	return connect.NewResponse(&pb.CreateWatcherResponse{WatcherId: id}), nil
}

// GetWatcherEvents implements the service. For a watcher that has lost events it
// first returns the remaining ones, then an error.
func (s *Service) GetWatcherEvents(_ context.Context, req *connect.Request[pb.GetWatcherEventsRequest]) (*connect.Response[pb.GetWatcherEventsResponse], error) {
	s.watchers.mu.Lock()
	p, ok := s.watchers.polled[req.Msg.GetWatcherId()]
	s.watchers.mu.Unlock()
	if !ok {
		return nil, noWatcher(req.Msg.GetWatcherId())
	}
	events, err := p.drain()
	if err != nil {
		return nil, watchError(err)
	}
	return connect.NewResponse(&pb.GetWatcherEventsResponse{Events: events}), nil
}

// RemoveWatcher implements the service.
func (s *Service) RemoveWatcher(_ context.Context, req *connect.Request[pb.RemoveWatcherRequest]) (*connect.Response[pb.RemoveWatcherResponse], error) {
	s.watchers.mu.Lock()
	p, ok := s.watchers.polled[req.Msg.GetWatcherId()]
	delete(s.watchers.polled, req.Msg.GetWatcherId())
	s.watchers.mu.Unlock()
	if !ok {
		return nil, noWatcher(req.Msg.GetWatcherId())
	}
	s.watchers.release()
	p.close()
	return connect.NewResponse(&pb.RemoveWatcherResponse{}), nil
}

func noWatcher(id string) error {
	return connect.NewError(connect.CodeNotFound, fmt.Errorf("watcher %q does not exist", id))
}
