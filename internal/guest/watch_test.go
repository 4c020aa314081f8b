package guest_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"bivy/internal/guest/wire"
	pb "bivy/internal/guest/wire/gen/filesystem"
	"bivy/internal/guest/wire/gen/filesystem/filesystemconnect"
)

// filesystem is a client of the filesystem service that uses JSON.
func (s *sandbox) filesystem(t *testing.T) filesystemconnect.FilesystemClient {
	t.Helper()
	tr := &http.Transport{}
	tr.DialContext = s.dialAny
	t.Cleanup(tr.CloseIdleConnections)
	withToken := connect.WithInterceptors(tokenInterceptor{})
	return filesystemconnect.NewFilesystemClient(&http.Client{Transport: tr}, "http://guest", connect.WithProtoJSON(), withToken)
}

type tokenInterceptor struct{}

func (tokenInterceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		r.Header().Set(wire.HeaderToken, token)
		return next(ctx, r)
	}
}

func (tokenInterceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		c := next(ctx, spec)
		c.RequestHeader().Set(wire.HeaderToken, token)
		return c
	}
}

func (tokenInterceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

func TestWatch(t *testing.T) {
	s := newSandbox(t)
	fs := s.filesystem(t)
	s.sh(t, "mkdir -p w/old/deep")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	stream, err := fs.WatchDir(ctx, connect.NewRequest(&pb.WatchDirRequest{Path: "w", Recursive: true, IncludeEntry: true}))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	if !stream.Receive() || stream.Msg().GetStart() == nil {
		t.Fatalf("no start: %v", stream.Err())
	}
	// expect reads events until all of want have come; others may come between.
	expect := func(script string, want ...string) {
		t.Helper()
		if r := s.sh(t, script); r.exit.Code != 0 {
			t.Fatalf("%s: %+v", script, r)
		}
		var seen []string
		for len(want) > 0 {
			if !stream.Receive() {
				t.Fatalf("%s: missing %q after %q: %v", script, want, seen, stream.Err())
			}
			e := stream.Msg().GetFilesystem()
			if e == nil {
				continue
			}
			text := strings.TrimPrefix(e.GetType().String(), "EVENT_TYPE_") + " " + e.GetName()
			seen = append(seen, text)
			if i := slices.Index(want, text); i >= 0 {
				want = slices.Delete(want, i, i+1)
			}
			if t := e.GetType(); e.Entry != nil && (t == pb.EventType_EVENT_TYPE_REMOVE || t == pb.EventType_EVENT_TYPE_RENAME) {
				panic("an entry for something that is gone")
			}
		}
	}
	expect("echo 1 > w/a", "CREATE a", "WRITE a")
	expect("chmod 600 w/a", "CHMOD a")
	expect("mv w/a w/b", "RENAME a", "CREATE b")
	expect("rm w/b", "REMOVE b")
	expect("echo 1 > w/old/deep/x", "CREATE old/deep/x", "WRITE old/deep/x")
	expect("mkdir -p w/n1/n2 && echo 1 > w/n1/n2/f", "CREATE n1", "CREATE n1/n2", "CREATE n1/n2/f")
	expect("echo 2 >> w/n1/n2/f", "WRITE n1/n2/f")
	expect("mv w/n1 w/m1 && echo 3 >> w/m1/n2/f", "RENAME n1", "CREATE m1", "WRITE m1/n2/f")
	expect("mv w/m1/n2 w/old/n3 && echo 4 >> w/old/n3/f && mv w/old/n3 w/m1/n2", "RENAME m1/n2", "CREATE old/n3", "WRITE old/n3/f", "CREATE m1/n2")
	// A directory moved out of the tree is not watched; moved back it is.
	expect("mv w/m1 m2 && echo 5 >> m2/n2/f && echo 1 > w/mark", "RENAME m1", "CREATE mark")
	expect("mv m2 w/m1", "CREATE m1", "CREATE m1/n2", "CREATE m1/n2/f")
	expect("echo 6 >> w/m1/n2/f", "WRITE m1/n2/f")
	expect("rm -r w/m1", "REMOVE m1/n2/f", "REMOVE m1/n2", "REMOVE m1")
	expect(`cd w; printf x > "$(printf 'odd\377')"`, "CREATE "+wire.Escape("odd\xff"))
	expect("rmdir w/old/deep 2>/dev/null || rm -r w/old/deep; mv w w2", "RENAME .")
}

func TestWatchNotRecursive(t *testing.T) {
	s := newSandbox(t)
	fs := s.filesystem(t)
	ctx := t.Context()
	dir := s.dir + "/small/w" // in memory: many files take no time
	s.sh(t, "mkdir -p "+dir+"/sub")
	res, err := fs.CreateWatcher(ctx, connect.NewRequest(&pb.CreateWatcherRequest{Path: dir}))
	if err != nil {
		t.Fatal(err)
	}
	id := res.Msg.GetWatcherId()
	s.sh(t, "cd "+dir+"; echo 1 > sub/unseen; echo 1 > seen")
	var names []string
	eventually(t, "events", func() bool {
		res, err := fs.GetWatcherEvents(ctx, connect.NewRequest(&pb.GetWatcherEventsRequest{WatcherId: id}))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range res.Msg.GetEvents() {
			if e.Entry != nil {
				t.Error("an entry that was not requested")
			}
			names = append(names, e.GetName())
		}
		return len(names) >= 2
	})
	if slices.Contains(names, "sub/unseen") || !slices.Contains(names, "seen") {
		t.Errorf("events %q", names)
	}
	// More events than a polled watcher keeps: it reports the loss.
	s.sh(t, "cd "+dir+"; i=0; while [ $i -lt 12 ]; do seq 1000 | sed s/^/x$i-/ | xargs touch; i=$((i+1)); done")
	eventually(t, "the loss is told", func() bool {
		_, err := fs.GetWatcherEvents(ctx, connect.NewRequest(&pb.GetWatcherEventsRequest{WatcherId: id}))
		return connect.CodeOf(err) == connect.CodeResourceExhausted
	})
	if _, err := fs.RemoveWatcher(ctx, connect.NewRequest(&pb.RemoveWatcherRequest{WatcherId: id})); err != nil {
		t.Error(err)
	}
	_, err1 := fs.RemoveWatcher(ctx, connect.NewRequest(&pb.RemoveWatcherRequest{WatcherId: id}))
	_, err2 := fs.GetWatcherEvents(ctx, connect.NewRequest(&pb.GetWatcherEventsRequest{WatcherId: id}))
	if connect.CodeOf(err1) != connect.CodeNotFound || connect.CodeOf(err2) != connect.CodeNotFound {
		t.Errorf("got %v, %v", err1, err2)
	}
}

func TestWatchRefusals(t *testing.T) {
	s := newSandbox(t)
	fs := s.filesystem(t)
	s.write(t, "", "file", "x")
	for path, want := range map[string]connect.Code{"nothing": connect.CodeNotFound, "file": connect.CodeInvalidArgument, "/root": connect.CodePermissionDenied, "~root": connect.CodeInvalidArgument} {
		_, err := fs.CreateWatcher(t.Context(), connect.NewRequest(&pb.CreateWatcherRequest{Path: path}))
		if connect.CodeOf(err) != want {
			t.Errorf("%s: got %v, want %v", path, err, want)
		}
	}
	// Neither a failed request nor a stream that has ended counts.
	for i := range 70 {
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := fs.WatchDir(ctx, connect.NewRequest(&pb.WatchDirRequest{Path: "~"}))
		if err != nil || !stream.Receive() {
			t.Fatalf("stream %d: %v, %v", i, err, errors.Join(err, stream.Err()))
		}
		cancel()
		_ = stream.Close()
		if i%20 == 19 {
			eventually(t, "streams end", func() bool { return inotifies(t, s.pid) == 0 })
		}
	}
	eventually(t, "streams end", func() bool { return inotifies(t, s.pid) == 0 })
	// The count is reduced a moment after the descriptor is closed.
	create := func() error {
		_, err := fs.CreateWatcher(t.Context(), connect.NewRequest(&pb.CreateWatcherRequest{Path: "~"}))
		return err
	}
	n := 0
	eventually(t, "64 watchers", func() bool {
		if create() == nil {
			n++
		}
		return n == 64
	})
	if err := create(); connect.CodeOf(err) != connect.CodeResourceExhausted {
		t.Errorf("one more: %v", err)
	}
}

// inotifies counts a process's inotify descriptors.
func inotifies(t *testing.T, pid int) int {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil && strings.Contains(to, "inotify") {
			n++
		}
	}
	return n
}

func TestWatchKeepalive(t *testing.T) {
	s := newSandbox(t)
	fs := s.filesystem(t)
	req := connect.NewRequest(&pb.WatchDirRequest{Path: "~"})
	req.Header().Set(wire.HeaderKeepalive, "1")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	stream, err := fs.WatchDir(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	for stream.Receive() {
		if stream.Msg().GetKeepalive() != nil {
			return
		}
	}
	t.Error(stream.Err())
}
