package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"

	"bivy/client"
	"bivy/internal/access"
	"bivy/internal/api"
	"bivy/internal/api/apitest"
	"bivy/internal/audit"
	"bivy/internal/driver/fake"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/workload"
)

// server is a server on a Backend, and a client with an admin's key.
type server struct {
	*client.Client
	b   *apitest.Backend
	url string
	ts  *httptest.Server
}

// scripted are templates whose creates go on in ways of their own.
func scripted(ctx context.Context, name string, progress func(done, total int64, what string)) (handled bool, err error) {
	switch name {
	case "broken":
		return true, errors.New("secret detail of a fault")
	case "panic":
		panic("secret detail of a panic")
	case "slow", "slow-broken":
		if progress != nil {
			for i := range int64(3) {
				progress(i+1, 3, "building "+name)
			}
		}
		if name == "slow-broken" {
			return true, kind.Errorf(kind.Exhausted, "no space left").WithField("template")
		}
		return true, nil
	}
	return false, nil
}

// backend is a Backend that is closed with the test.
func backend(t *testing.T, log *slog.Logger) *apitest.Backend {
	t.Helper()
	b, err := apitest.Start(t.Context(), t.TempDir(), apitest.Options{Resolve: scripted, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func serve(t *testing.T, change ...func(*api.Options)) *server {
	t.Helper()
	b := backend(t, nil)
	o := b.Options()
	for _, c := range change {
		c(&o)
	}
	h, err := api.New(o)
	if err != nil {
		t.Fatal(err)
	}
	ts := httptest.NewUnstartedServer(h)
	ts.Config = api.NewServer(h, nil)
	ts.Start()
	s := &server{b: b, url: ts.URL, ts: ts}
	s.Client = s.as(t, apitest.AdminSecret)
	t.Cleanup(func() {
		for info, err := range s.Sessions(context.Background(), client.ListOptions{States: []client.State{client.Running}}) {
			if err != nil {
				t.Error(err)
				break
			}
			if _, err := s.Session(info.ID).End(context.Background()); err != nil {
				t.Error(err)
			}
		}
		s.Client.Close()
		ts.Close()
	})
	return s
}

func (s *server) as(t *testing.T, key string) *client.Client {
	t.Helper()
	tr := http.DefaultTransport.(*http.Transport).Clone()
	tr.DisableCompression = true
	c, err := client.New(client.Options{URL: s.url, Key: key, HTTPClient: &http.Client{Transport: checked{tr, t, api.Validator(t)}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func (s *server) session(t *testing.T) *client.Session {
	t.Helper()
	sess, err := s.CreateSession(t.Context(), client.CreateSession{})
	if err != nil {
		t.Fatal(err)
	}
	return sess
}

// raw makes a request that no client would.
func (s *server) raw(t *testing.T, method, path, contentType, body string, header ...string) (int, client.Error, http.Header) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+apitest.AdminSecret)
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		}
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := s.ts.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	var e client.Error
	if resp.StatusCode >= 400 {
		if err := json.Unmarshal(b, &e); err != nil {
			t.Fatalf("%s %s: %d %q is not an error of this interface", method, path, resp.StatusCode, b)
		}
		if e.RequestID == "" || e.RequestID != resp.Header.Get("Bivy-Request-Id") {
			t.Errorf("%s %s: request id %q in the body, %q in the header", method, path, e.RequestID, resp.Header.Get("Bivy-Request-Id"))
		}
	}
	return resp.StatusCode, e, resp.Header
}

func TestLife(t *testing.T) {
	s := serve(t)
	ctx := t.Context()
	key := client.NewIdempotencyKey()
	spec := client.CreateSession{Spec: client.Spec{Template: "base", Labels: map[string]string{"job": "7"}}, OnBehalfOf: "ann"}
	sess, err := s.CreateSessionWith(ctx, spec, client.CreateOptions{IdempotencyKey: key})
	if err != nil {
		t.Fatal(err)
	}
	if sess.Info.State != client.Running || sess.Info.Owner.OnBehalfOf != "ann" || len(sess.Timing) == 0 {
		t.Errorf("created %+v, timing %v", sess.Info, sess.Timing)
	}
	again, err := s.CreateSessionWith(ctx, spec, client.CreateOptions{IdempotencyKey: key})
	if err != nil || again.ID != sess.ID || len(again.Timing) != 0 {
		t.Errorf("the same create again: %+v, %v; want session %s", again, err, sess.ID)
	}
	spec.Template = "slow"
	if _, err := s.CreateSessionWith(ctx, spec, client.CreateOptions{IdempotencyKey: key}); !errors.Is(err, &client.Error{Code: client.CodeConflict}) {
		t.Errorf("the key for another request: %v; want a conflict", err)
	}
	info, err := sess.SetTimeout(ctx, 1500*time.Millisecond)
	if err != nil || time.Until(info.Deadline) > 2*time.Second {
		t.Errorf("timeout: %v, deadline %v", err, info.Deadline)
	}
	if st, err := sess.Stats(ctx); err != nil || st.OOMKills != 0 {
		t.Errorf("stats: %+v, %v", st, err)
	}
	res, err := sess.Run(ctx, client.Command{Argv: []string{"sh", "-c", "printf out; printf err >&2; exit 7"}})
	if err != nil || string(res.Stdout) != "out" || string(res.Stderr) != "err" || res.Status() != 7 {
		t.Errorf("run: %+v, %v", res, err)
	}
	info, err = sess.End(ctx)
	if err != nil || info.State != client.Ended || info.Reason != "requested" {
		t.Errorf("end: %+v, %v", info, err)
	}
	if _, err := sess.End(ctx); err != nil {
		t.Errorf("end again: %v", err)
	}
	var last client.Event
	for ev, err := range sess.Events(ctx, 0) {
		if err != nil {
			t.Fatal(err)
		}
		if ev.Seq != last.Seq+1 {
			t.Errorf("event %d follows %d", ev.Seq, last.Seq)
		}
		last = ev
	}
	if last.Action != string(audit.SessionEnded) {
		t.Errorf("the record ends with %s", last.Action)
	}
	r, err := sess.Record(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	report, err := audit.Verify(r, []audit.PublicKey{s.b.PublicKey()}, audit.VerifyOptions{})
	if err != nil || !report.Sealed {
		t.Errorf("the record does not verify: %+v, %v", report, err)
	}
	if _, err := sess.Run(ctx, client.Command{Argv: []string{"true"}}); !errors.Is(err, &client.Error{Code: client.CodeConflict}) {
		t.Errorf("run in an ended session: %v; want a conflict", err)
	}
}

func TestPaging(t *testing.T) {
	s := serve(t)
	for range 5 {
		s.session(t)
	}
	n := 0
	for _, err := range s.Sessions(t.Context(), client.ListOptions{Limit: 2, States: []client.State{client.Running}}) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	if n != 5 {
		t.Errorf("%d sessions listed, want 5", n)
	}
}

func TestFollow(t *testing.T) {
	s := serve(t)
	sess := s.session(t)
	var actions []string
	for ev, err := range sess.Follow(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		actions = append(actions, ev.Action)
		if ev.Action == string(audit.SessionRunning) {
			if _, err := sess.End(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if len(actions) < 4 || actions[0] != string(audit.SessionCreated) || !slices.Contains(actions, string(audit.SessionEnding)) ||
		actions[len(actions)-1] != string(audit.SessionEnded) {
		t.Errorf("followed %v", actions)
	}
}

func TestProgress(t *testing.T) {
	s := serve(t)
	var news []client.Progress
	o := client.CreateOptions{Progress: func(p client.Progress) { news = append(news, p) }}
	if _, err := s.CreateSessionWith(t.Context(), client.CreateSession{Spec: client.Spec{Template: "slow"}}, o); err != nil {
		t.Fatal(err)
	}
	if len(news) == 0 || news[0].Total != 3 {
		t.Errorf("news %v", news)
	}
	_, err := s.CreateSessionWith(t.Context(), client.CreateSession{Spec: client.Spec{Template: "slow-broken"}}, o)
	if !errors.Is(err, &client.Error{Code: client.CodeExhausted}) {
		t.Errorf("a create that fails after news: %v", err)
	}
	for _, o := range []client.CreateOptions{o, {}} {
		s.b.Driver.Script(fake.Fault{Method: "Start", Mode: fake.FailBefore, Err: kind.Errorf(kind.Exhausted, "no space left").WithHint("remove something")})
		var e *client.Error
		_, err := s.CreateSessionWith(t.Context(), client.CreateSession{Spec: client.Spec{Template: "slow"}}, o)
		if !errors.As(err, &e) || e.Code != client.CodeExhausted || !strings.HasPrefix(e.Hint, "remove something; ") || !strings.Contains(e.Hint, ": bivy logs ") {
			t.Errorf("a create that began: %#v", err)
		}
	}
	_, err = s.CreateSessionWith(t.Context(), client.CreateSession{Spec: client.Spec{Template: "missing"}}, o)
	var e *client.Error
	if !errors.As(err, &e) || e.Status != 404 || e.Field != "template" || e.Hint == "" {
		t.Errorf("a create that fails before news: %#v", err)
	}
}

// slow is a Workload whose starts wait, and happen even when they are given up.
type slow struct {
	api.Workload
	began, release chan struct{}
}

func (s slow) Start(ctx context.Context, who access.Caller, id session.ID, cmd workload.Command) (*workload.Process, error) {
	p, err := s.Workload.Start(context.WithoutCancel(ctx), who, id, cmd)
	close(s.began)
	select {
	case <-s.release:
	case <-ctx.Done():
		if err == nil {
			p.Detach()
		}
		return nil, ctx.Err()
	}
	return p, err
}

// A caller that goes while its command starts takes the command along.
func TestKillWhileStarting(t *testing.T) {
	slow := slow{began: make(chan struct{}), release: make(chan struct{})}
	s := serve(t, func(o *api.Options) { slow.Workload = o.Workload; o.Workload = slow })
	sess := s.session(t)
	ctx, cancel := context.WithCancel(t.Context())
	gaveUp := make(chan error)
	go func() {
		_, err := sess.Start(ctx, client.Command{Argv: []string{"sleep", "103"}, OnDisconnect: client.Kill})
		gaveUp <- err
	}()
	<-slow.began
	list, err := sess.Commands(t.Context())
	if err != nil || len(list) != 1 {
		t.Fatalf("commands: %v, %v", list, err)
	}
	watch, err := sess.Attach(t.Context(), list[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-gaveUp; !errors.Is(err, context.Canceled) {
		t.Errorf("the caller that went: %v", err)
	}
	close(slow.release)
	if exit, err := watch.Wait(nil, nil); err != nil || exit.Signal != 9 {
		t.Errorf("the command ended with %+v, %v; want signal 9", exit, err)
	}
}

func TestCommandErrors(t *testing.T) {
	s := serve(t)
	sess := s.session(t)
	for _, tc := range []struct {
		name string
		cmd  client.Command
		code string
		want string // field
		exit int
	}{
		{"nothing", client.Command{}, client.CodeInvalid, "argv", 0},
		{"not found", client.Command{Argv: []string{"/no/such"}}, client.CodeInvalid, "argv", 127},
		{"not executable", client.Command{Argv: []string{"/etc/passwd"}}, client.CodeInvalid, "argv", 126},
		{"cwd", client.Command{Argv: []string{"true"}, Cwd: "/nowhere"}, client.CodeInvalid, "cwd", 0},
		{"NUL", client.Command{Argv: []string{"echo", "a\x00b"}}, client.CodeInvalid, "argv", 0},
		{"timeout", client.Command{Argv: []string{"true"}, TimeoutSeconds: -1}, client.CodeInvalid, "timeout_seconds", 0},
		{"disconnect", client.Command{Argv: []string{"true"}, OnDisconnect: "explode"}, client.CodeInvalid, "on_disconnect", 0},
		{"10 MB environment", client.Command{Argv: []string{"true"}, Env: map[string]string{"BIG": strings.Repeat("x", 10<<20)}}, client.CodeInvalid, "env", 0},
		{"env above the limit", client.Command{Argv: []string{"true"}, Env: map[string]string{"BIG": strings.Repeat("x", 200<<10)}}, client.CodeInvalid, "env", 0},
	} {
		for _, duplex := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/duplex=%t", tc.name, duplex), func(t *testing.T) {
				tc.cmd.Stdin = duplex
				_, err := sess.Start(t.Context(), tc.cmd)
				var e *client.Error
				if !errors.As(err, &e) {
					t.Fatalf("%T %v; want an *Error", err, err)
				}
				if e.Code != tc.code || e.Field != tc.want || e.ExitCode != tc.exit {
					t.Errorf("code %s, field %q, exit %d (%s); want %s, %q, %d", e.Code, e.Field, e.ExitCode, e.Message, tc.code, tc.want, tc.exit)
				}
			})
		}
	}
}

func TestStreams(t *testing.T) {
	s := serve(t)
	sess := s.session(t)
	ctx := t.Context()

	t.Run("stdin until its end", func(t *testing.T) {
		p, err := sess.Start(ctx, client.Command{Argv: []string{"cat"}, Stdin: true})
		if err != nil {
			t.Fatal(err)
		}
		in := bytes.Repeat([]byte{0, 1, 255, '\n'}, 300<<10)
		go func() {
			p.Write(in)
			p.CloseStdin()
		}()
		var out bytes.Buffer
		exit, err := p.Wait(&out, nil)
		if err != nil || exit.Status() != 0 || !bytes.Equal(out.Bytes(), in) {
			t.Errorf("exit %+v, %v; %d bytes came back of %d", exit, err, out.Len(), len(in))
		}
		if _, err := p.Next(); !errors.Is(err, io.EOF) {
			t.Errorf("after the end: %v", err)
		}
	})
	t.Run("no stdin", func(t *testing.T) {
		res, err := sess.Run(ctx, client.Command{Argv: []string{"cat"}})
		if err != nil || res.Status() != 0 || len(res.Stdout) != 0 {
			t.Errorf("%+v, %v", res, err)
		}
	})
	t.Run("a command that does not read, and a signal that overtakes", func(t *testing.T) {
		p, err := sess.Start(ctx, client.Command{Argv: []string{"sleep", "100"}, Stdin: true})
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			p.Write(make([]byte, 4<<20))
		}()
		if err := p.Signal(ctx, 15); err != nil {
			t.Fatal(err)
		}
		exit, err := p.Wait(nil, nil)
		if err != nil || exit.Signal != 15 || exit.Status() != 143 {
			t.Errorf("%+v, %v", exit, err)
		}
		<-done
	})
	t.Run("terminal", func(t *testing.T) {
		p, err := sess.Start(ctx, client.Command{Argv: []string{"sh", "-c", "stty size; read x; stty size; test -t 0 && echo tty"}, PTY: &client.Size{Cols: 80, Rows: 24}})
		if err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		resized := false
		for {
			ev, err := p.Next()
			if err != nil {
				t.Fatal(err)
			}
			if ev.Type == client.FrameEnd {
				break
			}
			out.Write(ev.Data)
			if !resized && strings.Contains(out.String(), "24 80") {
				resized = true
				if err := p.Resize(ctx, client.Size{Cols: 132, Rows: 50}); err != nil {
					t.Fatal(err)
				}
				if _, err := p.Write([]byte("go\n")); err != nil {
					t.Fatal(err)
				}
			}
		}
		if !strings.Contains(out.String(), "50 132") || !strings.Contains(out.String(), "tty") {
			t.Errorf("terminal said %q", out.String())
		}
	})
	t.Run("attach, input by requests", func(t *testing.T) {
		first, err := sess.Start(ctx, client.Command{Argv: []string{"cat"}, Stdin: true})
		if err != nil {
			t.Fatal(err)
		}
		second, err := sess.Attach(ctx, first.ID)
		if err != nil {
			t.Fatal(err)
		}
		if second.ID != first.ID || second.PID != first.PID {
			t.Errorf("attached to %s %d, want %s %d", second.ID, second.PID, first.ID, first.PID)
		}
		if _, err := second.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		for _, p := range []*client.Process{first, second} {
			if ev, err := p.Next(); err != nil || string(ev.Data) != "hello" {
				t.Errorf("%+v, %v", ev, err)
			}
		}
		list, err := sess.Commands(ctx)
		if err != nil || len(list) == 0 {
			t.Errorf("commands: %v, %v", list, err)
		}
		first.Close() // detaches
		if err := second.CloseStdin(); err != nil {
			t.Fatal(err)
		}
		if exit, err := second.Wait(nil, nil); err != nil || exit.Status() != 0 {
			t.Errorf("%+v, %v", exit, err)
		}
	})
	t.Run("caller gone", func(t *testing.T) {
		for _, duplex := range []bool{false, true} {
			ctx, cancel := context.WithCancel(ctx)
			p, err := sess.Start(ctx, client.Command{Argv: []string{"sleep", "101"}, OnDisconnect: client.Kill, Stdin: duplex})
			if err != nil {
				t.Fatal(err)
			}
			watch, err := sess.Attach(t.Context(), p.ID)
			if err != nil {
				t.Fatal(err)
			}
			cancel()
			if _, err := p.Next(); !errors.Is(err, client.ErrDetached) || !errors.Is(err, context.Canceled) {
				t.Errorf("the caller that went: %v", err)
			}
			exit, err := watch.Wait(nil, nil)
			if err != nil || exit.Signal != 9 {
				t.Errorf("duplex=%t: the command ended with %+v, %v; want signal 9", duplex, exit, err)
			}
		}
	})
	t.Run("detached", func(t *testing.T) {
		info, err := sess.StartDetached(ctx, client.Command{Argv: []string{"cat"}, Stdin: true, Tag: "bg"})
		if err != nil || info.ID == "" || info.Tag != "bg" {
			t.Fatalf("%+v, %v", info, err)
		}
		if err := sess.Signal(ctx, info.ID, 9); err != nil {
			t.Error(err)
		}
	})
}

// TestFlatMemory streams far more than may be held.
func TestFlatMemory(t *testing.T) {
	s := serve(t)
	sess := s.session(t)
	const size = 256 << 20
	p, err := sess.Start(t.Context(), client.Command{Argv: []string{"head", "-c", fmt.Sprint(size), "/dev/zero"}})
	if err != nil {
		t.Fatal(err)
	}
	var peak, before uint64
	read := func() uint64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapInuse
	}
	before = read()
	n, next := 0, 0
	for {
		ev, err := p.Next()
		if err != nil {
			t.Fatal(err)
		}
		if ev.Type == client.FrameEnd {
			break
		}
		n += len(ev.Data)
		if n > next {
			next += 16 << 20
			peak = max(peak, read())
		}
	}
	if n != size {
		t.Errorf("%d bytes arrived of %d", n, size)
	}
	if peak > before+32<<20 {
		t.Errorf("the heap grew from %d to %d MiB", before>>20, peak>>20)
	}
}

// TestHTTP2 is what a server with a certificate speaks.
func TestHTTP2(t *testing.T) {
	h, err := backend(t, nil).Handler()
	if err != nil {
		t.Fatal(err)
	}
	ts := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor != 2 {
			t.Errorf("HTTP/%d", r.ProtoMajor)
		}
		h.ServeHTTP(w, r)
	}))
	ts.EnableHTTP2 = true
	ts.StartTLS()
	defer ts.Close()
	c, err := client.New(client.Options{URL: ts.URL, Key: apitest.AdminSecret, HTTPClient: ts.Client()})
	if err != nil {
		t.Fatal(err)
	}
	sess, err := c.CreateSession(t.Context(), client.CreateSession{})
	if err != nil {
		t.Fatal(err)
	}
	p, err := sess.Start(t.Context(), client.Command{Argv: []string{"cat"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	// Question and answer: both directions are open at the same time.
	for range 3 {
		if _, err := p.Write([]byte("ping")); err != nil {
			t.Fatal(err)
		}
		if ev, err := p.Next(); err != nil || string(ev.Data) != "ping" {
			t.Fatalf("%+v, %v", ev, err)
		}
	}
	if err := p.CloseStdin(); err != nil {
		t.Fatal(err)
	}
	if exit, err := p.Wait(nil, nil); err != nil || exit.Status() != 0 {
		t.Errorf("%+v, %v", exit, err)
	}
	if _, err := sess.Start(t.Context(), client.Command{Argv: []string{"/no/such"}, Stdin: true}); !errors.Is(err, &client.Error{Code: client.CodeInvalid}) {
		t.Errorf("a command that does not exist: %v", err)
	}
	if _, err := sess.End(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestLines reads a stream as curl does.
func TestLines(t *testing.T) {
	s := serve(t)
	sess := s.session(t)
	body := `{"argv":["sh","-c","printf 'h\\303'; sleep 0.05; printf '\\251'; printf '\\377' >&2"]}`
	req, err := http.NewRequestWithContext(t.Context(), "POST", s.url+"/v1/sessions/"+sess.ID+"/commands", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+apitest.AdminSecret)
	req.Header.Set("Content-Type", "application/json")
	resp, err := checked{http.DefaultTransport, t, api.Validator(t)}.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, data := "", []byte(nil)
	dec := json.NewDecoder(resp.Body)
	var last client.CommandEvent
	for {
		var ev client.CommandEvent
		if err := dec.Decode(&ev); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		text += ev.Text
		data = append(data, ev.Data...)
		last = ev
	}
	if text != "hé" || !bytes.Equal(data, []byte{255}) || last.Exit == nil || last.Exit.Code != 0 {
		t.Errorf("text %q, data %v, last %+v", text, data, last)
	}
}

func TestFiles(t *testing.T) {
	s := serve(t)
	sess := s.session(t)
	ctx := t.Context()
	odd := "/dir/caf\xe9 \"#?%\n\u00e9\U0001F3D5"
	want := bytes.Repeat([]byte{0, 200}, 200<<10)
	info, err := sess.WriteFile(ctx, odd, bytes.NewReader(want), client.FileOptions{})
	if err != nil || info.ExactPath() != odd || info.Size != int64(len(want)) || info.SHA256 == "" {
		t.Fatalf("write: %+v, %v", info, err)
	}
	r, info, err := sess.ReadFile(ctx, odd, client.FileOptions{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(r)
	r.Close()
	if err != nil || !bytes.Equal(got, want) || info.ExactPath() != odd || info.Size != int64(len(want)) {
		t.Errorf("read %d bytes, %v, %+v", len(got), err, info)
	}
	if _, err := sess.MakeDir(ctx, "/dir/sub/deep", client.FileOptions{}); err != nil {
		t.Error(err)
	}
	list, err := sess.ListDir(ctx, "/dir", 2, client.FileOptions{})
	if err != nil || len(list) != 3 {
		t.Errorf("list: %+v, %v", list, err)
	}
	if _, err := sess.Move(ctx, odd, "/plain", client.FileOptions{}); err != nil {
		t.Error(err)
	}
	if info, err := sess.Stat(ctx, "/plain", client.FileOptions{}); err != nil || info.Type != client.RegularFile || info.RawPath != nil {
		t.Errorf("stat: %+v, %v", info, err)
	}
	if err := sess.Remove(ctx, "/dir", client.FileOptions{}); err != nil {
		t.Error(err)
	}
	if _, err := sess.Stat(ctx, "/dir", client.FileOptions{}); !errors.Is(err, &client.Error{Code: client.CodeNotFound}) {
		t.Errorf("stat of what was removed: %v", err)
	}
}

// cut is a Workload that breaks off in the middle of every file that is read.
type cut struct{ api.Workload }

func (c cut) ReadFile(ctx context.Context, who access.Caller, id session.ID, path, user string) (io.ReadCloser, workload.FileInfo, error) {
	r, info, err := c.Workload.ReadFile(ctx, who, id, path, user)
	if err != nil {
		return nil, info, err
	}
	broken := io.MultiReader(io.LimitReader(r, info.Size/2), iotest.ErrReader(errors.New("the sandbox is gone")))
	return struct {
		io.Reader
		io.Closer
	}{broken, r}, info, nil
}

// TestFileCutShort: what was read of a file is not taken for all of it.
func TestFileCutShort(t *testing.T) {
	s := serve(t, func(o *api.Options) { o.Workload = cut{o.Workload} })
	sess := s.session(t)
	// So small a file is cut before anything was sent; a longer one after.
	for _, size := range []int{4, 1 << 20} {
		if _, err := sess.WriteFile(t.Context(), "/x", strings.NewReader(strings.Repeat("x", size)), client.FileOptions{}); err != nil {
			t.Fatal(err)
		}
		if r, _, err := sess.ReadFile(t.Context(), "/x", client.FileOptions{}); err == nil {
			b, err := io.ReadAll(r)
			if err == nil {
				t.Errorf("a file of %d bytes that was cut short read as %d without an error", size, len(b))
			}
			r.Close()
		}
	}
}

func TestTemplatesAndKeys(t *testing.T) {
	s := serve(t)
	ctx := t.Context()
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "tool"), []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(root, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	var news int
	built, err := s.BuildTemplate(ctx, client.BuildTemplate{Version: 1, Name: "team/py:1", From: client.TemplateSource{Directory: &client.PathSource{Path: root}}},
		func(client.Progress) { news++ })
	if err != nil || built.Digest == "" || news == 0 {
		t.Fatalf("build: %+v, %v, %d news", built, err, news)
	}
	if got, err := s.Template(ctx, "team/py:1"); err != nil || got.Digest != built.Digest || got.Names[0] != "team/py:1" {
		t.Errorf("get: %+v, %v", got, err)
	}
	if list, err := s.Templates(ctx); err != nil || len(list) != 2 {
		t.Errorf("list: %+v, %v", list, err)
	}
	if err := s.DeleteTemplate(ctx, "team/py:1"); err != nil {
		t.Error(err)
	}
	_, err = s.BuildTemplate(ctx, client.BuildTemplate{Version: 1, From: client.TemplateSource{Image: &client.OCIImage{Ref: "127.0.0.1:1/x", PlainHTTP: true}}}, nil)
	var e *client.Error
	if !errors.As(err, &e) || e.Code != client.CodeUnavailable {
		t.Errorf("build of an image that cannot be reached: %v", err)
	}

	k, err := s.CreateKey(ctx, client.CreateKey{Label: "ci", Role: client.Developer})
	if err != nil || k.Secret == "" {
		t.Fatalf("key: %+v, %v", k, err)
	}
	dev := s.as(t, k.Secret)
	if _, err := dev.CreateSession(ctx, client.CreateSession{}); err != nil {
		t.Error(err)
	}
	if err := s.RevokeKey(ctx, k.ID); err != nil {
		t.Error(err)
	}
	if _, err := dev.Version(ctx); !errors.Is(err, &client.Error{Code: client.CodeUnauthenticated}) {
		t.Errorf("a revoked key: %v", err)
	}
}
