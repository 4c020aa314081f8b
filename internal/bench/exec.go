package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"time"

	"bivy/client"
)

const (
	addedName  = "what bivy adds to a command"
	execBlocks = 20
	execBlock  = 10 // commands in a row, of one side
)

// parent is a process inside the guest that starts commands itself and says
// what each took, in nanoseconds.
const parent = `
import os, sys, time
for line in sys.stdin:
    took = []
    for _ in range(int(line)):
        start = time.monotonic_ns()
        pid = os.posix_spawn("/bin/true", ["true"], {})
        os.waitpid(pid, 0)
        took.append(time.monotonic_ns() - start)
    print("\n".join(map(str, took)), flush=True)
`

// commands measures what a command costs through the interface, beside what it
// costs a parent inside: the difference is HTTP, the way in, the record and
// the agent.
func commands(ctx context.Context, b *bench) (_ []Figure, err error) {
	s, err := b.serve(ctx)
	if err != nil {
		return nil, err
	}
	session, err := s.client.CreateSession(ctx, client.CreateSession{})
	if err != nil {
		return nil, err
	}
	defer func() {
		_, endErr := session.End(context.WithoutCancel(ctx))
		err = errors.Join(err, endErr)
	}()
	p, err := session.Start(ctx, client.Command{Argv: []string{"python3", "-c", parent}, Stdin: true, OnDisconnect: client.Kill})
	if err != nil {
		return nil, err
	}
	inside, failed := reports(p)
	outside, within, floor := &series{}, &series{}, &series{}
	sides := []func(counts bool) error{
		func(counts bool) error { return apiBlock(ctx, s, session, outside, counts) },
		func(counts bool) error { return insideBlock(ctx, p, inside, failed, within, counts) },
		func(counts bool) error { return floorBlock(ctx, session, floor, counts) },
	}
	for r := -warmUps; r < execBlocks; r++ {
		for _, i := range rand.Perm(len(sides)) { //nolint:gosec // an order of turns, not a secret
			if err := sides[i](r >= 0); err != nil {
				return nil, err
			}
		}
	}
	if err := p.CloseStdin(); err != nil {
		return nil, err
	}
	if err := <-failed; err != nil {
		return nil, err
	}
	added := single(addedName, "ms", round(outside.p50()-within.p50()))
	added.N, added.Note = len(outside.values), "difference of the p50s below"
	return []Figure{added, outside.figure("/bin/true through the API", "ms"), within.figure("/bin/true by a parent inside", "ms"),
		floor.figure("asking the API about the session", "ms")}, nil
}

func apiBlock(ctx context.Context, s *server, session *client.Session, out *series, counts bool) error {
	for range execBlock {
		cpu, start := s.cpu()+self(), time.Now()
		r, err := session.Run(ctx, client.Command{Argv: []string{"/bin/true"}})
		if err != nil || r.Status() != 0 {
			return fmt.Errorf("/bin/true: exit %d: %w", r.Status(), err)
		}
		if counts {
			out.took(time.Since(start))
			out.used(s.cpu() + self() - cpu)
		}
	}
	return nil
}

func floorBlock(ctx context.Context, session *client.Session, out *series, counts bool) error {
	for range execBlock {
		start := time.Now()
		if _, err := session.Get(ctx); err != nil {
			return err
		}
		if counts {
			out.took(time.Since(start))
		}
	}
	return nil
}

// reports reads what the parent inside prints. failed gives how that ended,
// once.
func reports(p *client.Process) (numbers <-chan time.Duration, failed <-chan error) {
	read, write := io.Pipe()
	out, ended := make(chan time.Duration, execBlock), make(chan error, 1)
	go func() { // ends with the command
		exit, err := p.Wait(write, io.Discard)
		if err == nil && exit.Status() != 0 {
			err = fmt.Errorf("the parent inside ended with %d", exit.Status())
		}
		ended <- err
		write.Close()
	}()
	go func() { // ends with the pipe
		for lines := bufio.NewScanner(read); lines.Scan(); {
			if n, err := strconv.ParseInt(lines.Text(), 10, 64); err == nil {
				out <- time.Duration(n)
			}
		}
	}()
	return out, ended
}

func insideBlock(ctx context.Context, p *client.Process, numbers <-chan time.Duration, failed <-chan error, out *series, counts bool) error {
	if _, err := fmt.Fprintln(p, execBlock); err != nil {
		return err
	}
	for range execBlock {
		select {
		case d := <-numbers:
			if counts {
				out.took(d)
			}
		case err := <-failed:
			return fmt.Errorf("the parent inside ended early: %w", err)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
