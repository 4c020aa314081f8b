package cli

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bivy/client"
)

// A server that does not take signals does not keep the person from giving up.
func TestGivesUpOnASilentServer(t *testing.T) {
	asked := make(chan struct{}, insist)
	release := make(chan struct{})
	ts := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/sessions/s/commands" {
			w.Header().Set("Content-Type", client.StreamType)
			started, err := client.AppendFrameJSON(nil, client.FrameStart, client.Started{ID: "c", PID: 1})
			if err != nil {
				t.Error(err)
			}
			_, _ = w.Write(started)
			_ = http.NewResponseController(w).Flush()
		} else {
			asked <- struct{}{}
		}
		<-release
	}))
	defer ts.Close()
	defer close(release)
	c, err := client.New(client.Options{URL: ts.URL, Key: "k"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p, err := c.Session("s").Start(t.Context(), client.Command{Argv: []string{"x"}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	ctx, giveUp := context.WithCancel(t.Context())
	s := catch(giveUp)
	defer s.stop()
	s.attach(p, nil)
	s.ch <- unix.SIGTERM
	<-asked
	for range insist - 1 {
		s.ch <- unix.SIGTERM
	}
	select {
	case <-ctx.Done():
	case <-time.After(signalPatience / 2):
		t.Error("the third signal waits for the first")
	}
	if s.gaveUp() != int(unix.SIGTERM) {
		t.Errorf("gave up because of %d", s.gaveUp())
	}
}
