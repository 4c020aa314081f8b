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

// insist is how often a terminating signal must come before the command is
// given up rather than told.
const insist = 3

const (
	// signalPatience is how long a signal may take to its command.
	signalPatience = 2 * time.Second
	// maxSends bounds the signals that wait for it.
	maxSends = 16
)

// signals passes this process's signals to the command. Before there is one,
// a terminating signal gives up.
type signals struct {
	ch     chan os.Signal
	pipe   chan os.Signal
	done   chan struct{}
	sends  chan func(context.Context)
	giveUp context.CancelFunc
	resize func(context.Context) // on SIGWINCH; nil without a terminal

	mu    sync.Mutex
	p     *client.Process
	got   syscall.Signal // that made it give up
	times map[syscall.Signal]int
}

// catch takes the signals over. stop gives them back.
func catch(giveUp context.CancelFunc) *signals {
	s := &signals{ch: make(chan os.Signal, 16), pipe: make(chan os.Signal, 1), done: make(chan struct{}),
		sends: make(chan func(context.Context), maxSends), giveUp: giveUp, times: map[syscall.Signal]int{}}
	signal.Notify(s.ch, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH)
	// With somebody listening, writing to a closed pipe is an error like any
	// other, and does not end this process before it has cleaned up.
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
	over := ends && (p == nil || s.times[n] >= insist)
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
		s.giveUp()
	case p != nil:
		// A command that has just ended takes no signal, and needs none.
		s.enqueue(func(ctx context.Context) { _ = p.Signal(ctx, int(n)) })
	}
}

// enqueue leaves a request to send, so that a server that does not answer
// cannot keep the next signal from making this process give up.
func (s *signals) enqueue(request func(context.Context)) {
	select {
	case s.sends <- request:
	default: // as many wait as anybody could want
	}
}

// send makes requests, in order.
func (s *signals) send() {
	for {
		select {
		case request := <-s.sends:
			ctx, cancel := context.WithTimeout(context.Background(), signalPatience)
			request(ctx)
			cancel()
		case <-s.done:
			return
		}
	}
}

// attach says where signals go from now on.
func (s *signals) attach(p *client.Process, resize func(context.Context)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.p, s.resize = p, resize
}

// gaveUp returns the signal that made it give up, or 0.
func (s *signals) gaveUp() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return int(s.got)
}
