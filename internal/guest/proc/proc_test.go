package proc

import (
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"bivy/internal/guest/wire"
	pb "bivy/internal/guest/wire/gen/process"
)

func TestRetention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewService(nil, nil, slog.New(slog.DiscardHandler))
		tag := "t"
		old, young := &Process{pid: 7, tag: &tag}, &Process{pid: 8}
		s.running[7], s.running[8] = old, young
		s.finished(old)
		pid := func(n uint32) *pb.ProcessSelector {
			return &pb.ProcessSelector{Selector: &pb.ProcessSelector_Pid{Pid: n}}
		}
		time.Sleep(wire.Retention - time.Second)
		s.finished(young)
		for _, sel := range []*pb.ProcessSelector{pid(7), pid(8), {Selector: &pb.ProcessSelector_Tag{Tag: "t"}}} {
			if _, err := s.find(sel, true); err != nil {
				t.Errorf("%v is forgotten too early: %v", sel, err)
			}
			if _, err := s.find(sel, false); connect.CodeOf(err) != connect.CodeNotFound {
				t.Errorf("%v still runs: %v", sel, err)
			}
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if _, err := s.find(pid(7), true); connect.CodeOf(err) != connect.CodeNotFound || wire.ReasonOf(err) != wire.ReasonNoProcess {
			t.Errorf("the oldest process is kept: %v", err)
		}
		if _, err := s.find(pid(8), true); err != nil {
			t.Errorf("the newest process is removed: %v", err)
		}
		for n := range 3 * maxEnded {
			s.finished(&Process{pid: 100 + n})
		}
		kept := func() int {
			s.mu.Lock()
			defer s.mu.Unlock()
			return len(s.ended)
		}
		if n := kept(); n > maxEnded {
			t.Errorf("%d ends are kept", n)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := kept(); n != 0 {
			t.Errorf("%d ends are kept for ever", n)
		}
		if _, err := s.find(&pb.ProcessSelector{}, true); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("no selector: %v", err)
		}
	})
}

func TestFanout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var pool chunkPool
		f := fanout{pool: &pool}
		f.send(pool.get()) // without subscribers
		slow, quick, leaver := f.subscribe(), f.subscribe(), f.subscribe()
		sent := 0
		go func() {
			for i := range 10 {
				c := pool.get()
				c.data = append(c.data, byte(i))
				f.send(c)
				sent++
			}
			f.close()
		}()
		var got []byte
		go func() {
			for c := range quick.chunks {
				got = append(got, c.data...)
				pool.release(c)
			}
		}()
		synctest.Wait()
		if sent != queue {
			t.Errorf("%d chunks are sent past those that do not read, want %d", sent, queue)
		}
		f.unsubscribe(leaver)
		synctest.Wait()
		if sent != queue {
			t.Errorf("%d chunks are sent past the slow one, want %d", sent, queue)
		}
		n := 0
		for c := range slow.chunks {
			if len(c.data) != 1 || int(c.data[0]) != n {
				t.Fatalf("chunk %d is %v", n, c.data)
			}
			n++
			pool.release(c)
		}
		synctest.Wait()
		if d := cmp.Diff([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, got); d != "" || n != 10 {
			t.Error(n, d)
		}
		f.unsubscribe(slow)
		if _, ok := <-f.subscribe().chunks; ok {
			t.Error("a subscriber after the end gets chunks")
		}
	})
}

func TestParseStat(t *testing.T) {
	text, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		t.Fatal(err)
	}
	p, ok := parseStat(text)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_RSS, &limit); err != nil {
		t.Fatal(err)
	}
	if !ok || p.pid != os.Getpid() || p.ppid != os.Getppid() || p.mark != limit.Cur {
		t.Errorf("got %+v", p)
	}
	rest := " S 1 2 3 0 -1 4194560 1 0 0 0 5 6 0 0 20 0 1 0 100 1000 10 42 0 0"
	for name, ok := range map[string]bool{
		"7 (sh)" + rest: true, "7 (a) (b) c)" + rest: true, "7 (new\nline)" + rest: true, "7 ()" + rest: true,
		"7 (sh)": false, "": false, ")(": false, "x (sh)" + rest: false, "7 sh" + rest: false, "7 (sh)" + strings.Replace(rest, "42", "x", 1): false,
	} {
		got, parsed := parseStat([]byte(name))
		want := stat{pid: 7, ppid: 1, pgrp: 2, session: 3, state: 'S', ticks: 11, mark: 42}
		if parsed != ok || (ok && got != want) {
			t.Errorf("%q: got %+v, %v", name, got, parsed)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("7 (sh) S 1 2 3 0 -1 4194560 1 0 0 0 5 6 0 0 20 0 1 0 100 1000 10 42 0 0"))
	f.Add([]byte("1 (() ) R"))
	f.Fuzz(func(_ *testing.T, text []byte) { parseStat(text) })
}

func TestMembers(t *testing.T) {
	all := []stat{
		{pid: 10, ppid: 1, pgrp: 10, session: 10, mark: 5},   // the leader
		{pid: 13, ppid: 12, pgrp: 13, session: 13},           // grandchild of the orphan
		{pid: 11, ppid: 10, pgrp: 11, session: 10, mark: 5},  // a job of its shell
		{pid: 12, ppid: 1, pgrp: 12, session: 12, mark: 5},   // orphaned, in a session of its own
		{pid: 14, ppid: 13, pgrp: 14, session: 14},           // and its child
		{pid: 15, ppid: 1, pgrp: 10, session: 9, mark: 77},   // in the group
		{pid: 20, ppid: 1, pgrp: 20, session: 20, mark: 6},   // another tree
		{pid: 21, ppid: 20, pgrp: 20, session: 20, mark: 6},  // and its child
		{pid: os.Getpid(), ppid: 10, pgrp: 10, session: 10},  // never the agent itself
		{pid: 30, ppid: os.Getpid(), pgrp: 30, session: 30},  // nor children of the agent
		{pid: 31, ppid: 1, pgrp: 31, session: 31, mark: 0},   // unmarked
		{pid: 16, ppid: 1, pgrp: 16, session: 10, mark: 999}, // in the session
	}
	var got []int
	for _, p := range members(all, 10, 5) {
		got = append(got, p.pid)
	}
	slices.Sort(got)
	if d := cmp.Diff([]int{10, 11, 12, 13, 14, 15, 16}, got); d != "" {
		t.Error(d)
	}
	got = nil
	for _, p := range members(all, 31, 0) {
		got = append(got, p.pid)
	}
	if d := cmp.Diff([]int{31}, got); d != "" {
		t.Errorf("a process without a mark: %s", d)
	}
}

func TestHeaders(t *testing.T) {
	for value, want := range map[string]string{"": "", "Basic dXNlcjo=": "user", "basic cm9vdDpwdw==": "root", "Bearer x": "", "Basic Og==": ""} {
		if got, err := Username(http.Header{"Authorization": {value}}); err != nil || got != want {
			t.Errorf("%q: %q, %v", value, got, err)
		}
	}
	for _, value := range []string{"Basic !", "Basic dXNlcg=="} {
		if got, err := Username(http.Header{"Authorization": {value}}); connect.CodeOf(err) != connect.CodeUnauthenticated {
			t.Errorf("%q: %q, %v", value, got, err)
		}
	}
	for value, want := range map[string]time.Duration{"": keepalive, "50": 50 * time.Second, "0": keepalive, "-1": keepalive, "x": keepalive, "999999": time.Hour} {
		if got := Keepalive(http.Header{wire.HeaderKeepalive: {value}}); got != want {
			t.Errorf("%q: %v", value, got)
		}
	}
}
