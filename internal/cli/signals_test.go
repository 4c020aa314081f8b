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

// TestThirdSignalCancels: a server that does not answer the request for the first
// signal does not keep the third one from cancelling.
func TestThirdSignalCancels(t *testing.T) {
	asked := make(chan struct{}, maxSignals)
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
	ctx, cancel := context.WithCancel(t.Context())
	s := notify(cancel)
	defer s.stop()
	s.attach(p, nil)
	s.ch <- unix.SIGTERM
	<-asked
	for range maxSignals - 1 {
		s.ch <- unix.SIGTERM
	}
	select {
	case <-ctx.Done():
	case <-time.After(signalTimeout / 2):
		t.Error("the third signal waits for the first")
	}
	if s.cancelledBy() != int(unix.SIGTERM) {
		t.Errorf("cancelled by signal %d", s.cancelledBy())
	}
}
