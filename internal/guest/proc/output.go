package proc

import (
	"os"
	"sync"
	"sync/atomic"

	pb "bivy/internal/guest/wire/gen/process"

	"bivy/internal/guest/wire"
)

// stream is the output of a process that a chunk was read from.
type stream uint8

const (
	stdout stream = iota
	stderr
	terminal
)

// chunk is a piece of output that all subscribers share. When the last one
// releases it, it returns to the pool. Chunks in the queue of a subscriber that
// unsubscribes are left to the garbage collector.
type chunk struct {
	from stream
	data []byte
	refs atomic.Int32
}

type chunkPool struct{ pool sync.Pool }

func (p *chunkPool) get() *chunk {
	if c, ok := p.pool.Get().(*chunk); ok {
		return c
	}
	return &chunk{data: make([]byte, 0, wire.OutputChunk)}
}

func (p *chunkPool) put(c *chunk) {
	c.data = c.data[:0]
	p.pool.Put(c)
}

// release drops one reference.
func (p *chunkPool) release(c *chunk) {
	if c.refs.Add(-1) == 0 {
		p.put(c)
	}
}

// event returns the message for c, which shares c's data.
func (c *chunk) event() *pb.ProcessEvent {
	data := &pb.ProcessEvent_DataEvent{}
	switch c.from {
	case stdout:
		data.Output = &pb.ProcessEvent_DataEvent_Stdout{Stdout: c.data}
	case stderr:
		data.Output = &pb.ProcessEvent_DataEvent_Stderr{Stderr: c.data}
	case terminal:
		data.Output = &pb.ProcessEvent_DataEvent_Pty{Pty: c.data}
	}
	return &pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: data}}
}

// queue is how many chunks can wait for one subscriber. With two, the next chunk
// is read while one is sent.
const queue = 2

// subscriber is one stream that follows a process.
type subscriber struct {
	chunks       chan *chunk   // closed after the last one
	unsubscribed chan struct{} // closed when the subscriber's stream has ended
}

// fanout sends the output of one process to its followers. A slow follower makes
// the process wait, like a full pipe; one that has unsubscribed does not. Without
// followers the output is dropped.
type fanout struct {
	pool *chunkPool

	sending sync.Mutex // one chunk at a time, so that all followers see the same order

	mu     sync.Mutex
	subs   map[*subscriber]struct{}
	closed bool
}

func (f *fanout) subscribe() *subscriber {
	s := &subscriber{chunks: make(chan *chunk, queue), unsubscribed: make(chan struct{})}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		close(s.chunks)
		return s
	}
	if f.subs == nil {
		f.subs = map[*subscriber]struct{}{}
	}
	f.subs[s] = struct{}{}
	return s
}

// unsubscribe ends a subscription. It must be called exactly once.
func (f *fanout) unsubscribe(s *subscriber) {
	close(s.unsubscribed)
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.subs, s)
}

func (f *fanout) send(c *chunk) {
	f.sending.Lock()
	defer f.sending.Unlock()
	f.mu.Lock()
	subs := make([]*subscriber, 0, len(f.subs))
	for s := range f.subs {
		subs = append(subs, s)
	}
	f.mu.Unlock()
	c.refs.Store(int32(len(subs)) + 1) //nolint:gosec // bounded by the connections
	for _, s := range subs {
		select {
		case s.chunks <- c:
		case <-s.unsubscribed:
			f.pool.release(c)
		}
	}
	f.pool.release(c)
}

// close closes the followers' channels. send must not be called after it.
func (f *fanout) close() {
	f.sending.Lock()
	defer f.sending.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	for s := range f.subs {
		close(s.chunks)
	}
	f.subs = nil
}

// waitRead waits until f has data and reads it into a chunk from the pool. It
// takes a chunk only when there is data, so that idle processes hold no buffers.
// At the end of the file it returns nil and no error.
func waitRead(f *os.File, pool *chunkPool, limit int) (*chunk, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	var c *chunk
	var readErr error
	err = raw.Read(func(fd uintptr) bool {
		c, readErr = readChunk(int(fd), pool, limit)
		return !isEAGAIN(readErr)
	})
	if err != nil {
		return nil, err
	}
	return c, readErr
}

// tryRead is waitRead without waiting, also after the deadline of f. It returns
// EAGAIN when there is no data.
func tryRead(f *os.File, pool *chunkPool, limit int) (*chunk, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	var c *chunk
	var readErr error
	err = raw.Control(func(fd uintptr) { c, readErr = readChunk(int(fd), pool, limit) })
	if err != nil {
		return nil, err
	}
	return c, readErr
}

func readChunk(fd int, pool *chunkPool, limit int) (*chunk, error) {
	c := pool.get()
	n, err := readFD(fd, c.data[:limit])
	if err != nil || n == 0 {
		pool.put(c)
		return nil, err
	}
	c.data = c.data[:n]
	return c, nil
}
