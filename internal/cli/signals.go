package cli

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"bivy/client"
)

// insist is how often a terminating signal must come before the command is
// given up rather than told.
const insist = 3

// signals passes this process's signals to the command. Before there is one,
// a terminating signal gives up.
type signals struct {
	ch     chan os.Signal
	pipe   chan os.Signal
	done   chan struct{}
	giveUp context.CancelFunc
	resize func() // on SIGWINCH; nil without a terminal

	mu    sync.Mutex
	p     *client.Process
	got   syscall.Signal // that made it give up
	times map[syscall.Signal]int
}

// catch takes the signals over. stop gives them back.
func catch(giveUp context.CancelFunc) *signals {
	s := &signals{ch: make(chan os.Signal, 16), pipe: make(chan os.Signal, 1), done: make(chan struct{}),
		giveUp: giveUp, times: map[syscall.Signal]int{}}
	signal.Notify(s.ch, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH)
	// With somebody listening, writing to a closed pipe is an error like any
	// other, and does not end this process before it has cleaned up.
	signal.Notify(s.pipe, unix.SIGPIPE)
	go s.loop() // ends with stop
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
			resize()
		}
	case over:
		s.giveUp()
	case p != nil:
		// A command that has just ended takes no signal, and needs none.
		_ = p.Signal(context.Background(), int(n))
	}
}

// attach says where signals go from now on.
func (s *signals) attach(p *client.Process, resize func()) {
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
