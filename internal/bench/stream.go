package bench

import (
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
	streamBytes  = 256 << 20
	streamRounds = 5
)

// stream measures how fast output leaves a sandbox, and how fast files enter
// and leave it. Few rounds: each moves a lot.
func stream(ctx context.Context, b *bench) (_ []Figure, err error) {
	s, err := b.serve(ctx)
	if err != nil {
		return nil, err
	}
	var want client.CreateSession
	want.Resources.MemoryMiB = 2048 // files are in memory
	session, err := s.client.CreateSession(ctx, want)
	if err != nil {
		return nil, err
	}
	defer func() {
		_, endErr := session.End(context.WithoutCancel(ctx))
		err = errors.Join(err, endErr)
	}()
	if _, err := session.WriteFile(ctx, "/tmp/down", zeros(streamBytes), client.FileOptions{}); err != nil {
		return nil, err
	}
	ways := []struct {
		name string
		do   func() (int64, error)
	}{
		{"command output", func() (int64, error) { return output(ctx, session) }},
		{"file upload", func() (int64, error) {
			_, err := session.WriteFile(ctx, "/tmp/up", zeros(streamBytes), client.FileOptions{})
			return streamBytes, err
		}},
		{"file download", func() (int64, error) {
			r, _, err := session.ReadFile(ctx, "/tmp/down", client.FileOptions{})
			if err != nil {
				return 0, err
			}
			defer r.Close()
			return io.Copy(io.Discard, r)
		}},
	}
	speeds := make([]series, len(ways))
	for r := -1; r < streamRounds; r++ {
		for _, i := range rand.Perm(len(ways)) { //nolint:gosec // an order of turns, not a secret
			cpu, start := s.cpu()+self(), time.Now()
			n, err := ways[i].do()
			if err != nil || n != streamBytes {
				return nil, fmt.Errorf("%s: %d of %d bytes: %w", ways[i].name, n, streamBytes, err)
			}
			if r >= 0 {
				speeds[i].add(float64(n) / 1e6 / time.Since(start).Seconds())
				speeds[i].used(s.cpu() + self() - cpu)
			}
		}
	}
	var figures []Figure
	for i, w := range ways {
		f := speeds[i].figure(w.name+", 256 MiB", "MB/s")
		f.Note = "more is better"
		figures = append(figures, f)
	}
	return figures, nil
}

// output runs a command that prints a lot.
func output(ctx context.Context, session *client.Session) (int64, error) {
	p, err := session.Start(ctx, client.Command{Argv: []string{"head", "-c", strconv.Itoa(streamBytes), "/dev/zero"}, OnDisconnect: client.Kill})
	if err != nil {
		return 0, err
	}
	var n counter
	exit, err := p.Wait(&n, io.Discard)
	if err == nil && exit.Status() != 0 {
		err = fmt.Errorf("head: exit %d", exit.Status())
	}
	return int64(n), err
}

type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}

// zeros reads as n zero bytes.
func zeros(n int64) io.Reader { return io.LimitReader(zero{}, n) }

type zero struct{}

func (zero) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
