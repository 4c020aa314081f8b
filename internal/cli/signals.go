package cli

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"bivy/client"
)

// maxSignals is how many times a terminating signal must arrive until bivy stops
// waiting for the command instead of passing the signal on.
const maxSignals = 3

const (
	// signalTimeout limits the request that passes a signal on.
	signalTimeout = 2 * time.Second
	// maxSends is how many such requests may be waiting.
	maxSends = 16
)

// signals passes the signals of this process to the command in the session. While
// there is no command, a terminating signal cancels the work.
type signals struct {
	ch     chan os.Signal
	pipe   chan os.Signal
	done   chan struct{}
	sends  chan func(context.Context)
	cancel context.CancelFunc
	resize func(context.Context) // on SIGWINCH; nil without a terminal

	mu    sync.Mutex
	p     *client.Process
	got   syscall.Signal         // that cancelled the work; 0: none
	times map[syscall.Signal]int // how often each has arrived
}

// notify starts receiving signals, until stop is called. cancel cancels the work.
func notify(cancel context.CancelFunc) *signals {
	s := &signals{ch: make(chan os.Signal, 16), pipe: make(chan os.Signal, 1), done: make(chan struct{}),
		sends: make(chan func(context.Context), maxSends), cancel: cancel, times: map[syscall.Signal]int{}}
	signal.Notify(s.ch, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH)
	// With a receiver for SIGPIPE, writing to a closed pipe is an ordinary error
	// and does not end this process before it has cleaned up.
	signal.Notify(s.pipe, unix.SIGPIPE)
	go s.loop() // both end with stop
	go s.send()
	return s
}

func (s *signals) stop() {
	signal.Stop(s.ch)
	signal.Stop(s.pipe)
	close(s.done)
}

func (s *signals) loop() {
	for {
		select {
		case sig := <-s.ch:
			if n, ok := sig.(syscall.Signal); ok {
				s.handle(n)
			}
		case <-s.done:
			return
		}
	}
}

func (s *signals) handle(n syscall.Signal) {
	s.mu.Lock()
	p, resize := s.p, s.resize
	s.times[n]++
	ends := n == unix.SIGINT || n == unix.SIGTERM || n == unix.SIGHUP || n == unix.SIGQUIT
	over := ends && (p == nil || s.times[n] >= maxSignals)
	if over && s.got == 0 {
		s.got = n
	}
	s.mu.Unlock()
	switch {
	case n == unix.SIGWINCH:
		if resize != nil {
			s.enqueue(resize)
		}
	case over:
		s.cancel()
	case p != nil:
		// An error means that the command has ended, so there is nothing to signal.
		s.enqueue(func(ctx context.Context) { _ = p.Signal(ctx, int(n)) })
	}
}

// enqueue adds a request to the queue of send. Signals are handled while it waits:
// a server that does not answer cannot keep the third one from cancelling.
func (s *signals) enqueue(request func(context.Context)) {
	select {
	case s.sends <- request:
	default: // the queue is full: drop the signal
	}
}

// send makes the requests of the queue, one after the other.
func (s *signals) send() {
	for {
		select {
		case request := <-s.sends:
			ctx, cancel := context.WithTimeout(context.Background(), signalTimeout)
			request(ctx)
			cancel()
		case <-s.done:
			return
		}
	}
}

// attach sets the command that signals go to; nil: none.
func (s *signals) attach(p *client.Process, resize func(context.Context)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.p, s.resize = p, resize
}

// cancelledBy returns the signal that cancelled the work, or 0.
func (s *signals) cancelledBy() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return int(s.got)
}
