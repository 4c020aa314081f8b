package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"bivy/client"
	"bivy/internal/audit"
	"bivy/internal/config"
	"bivy/internal/kind"
	"bivy/internal/session"
)

var (
	auditActor  = session.Principal{Subject: "key:0badcafe"}
	auditMoment = audit.Moment{Now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Boot: "boot-1", Uptime: 5 * time.Second}
)

// chain is one record of a testNode.
type chain struct {
	head    audit.Head
	events  []audit.Stored
	addenda []audit.Stored
	seals   []audit.Seal // of the record, and of its addenda
}

func (c *chain) clone() *chain {
	d := *c
	d.head.Counts = maps.Clone(c.head.Counts)
	d.events, d.addenda, d.seals = slices.Clone(c.events), slices.Clone(c.addenda), slices.Clone(c.seals)
	return &d
}

// testNode keeps records in memory and serves the routes of the audit commands.
type testNode struct {
	t       *testing.T
	dir     string // of the signing key
	signer  *audit.Signer
	name    session.NodeID
	tree    audit.Tree
	sealed  []audit.ListedRecord
	records map[session.ID]*chain
	system  *chain   // the open segment
	closed  []*chain // the segments before it
	// answers are records that are served in place of others.
	answers map[session.ID]session.ID
	// traces are the traceparent headers of requests.
	traces []string
}

func newTestNode(t *testing.T) *testNode {
	t.Helper()
	dir := t.TempDir()
	signer, err := audit.LoadSigner(dir, false)
	if err != nil {
		t.Fatal(err)
	}
	n := &testNode{t: t, dir: dir, signer: signer, name: "node-1", records: map[session.ID]*chain{}, answers: map[session.ID]session.ID{}}
	n.system = &chain{head: audit.Start(audit.SystemRecord(n.name, 1), "")}
	n.system.head.Counts = map[audit.Action]uint64{}
	n.add(n.system, audit.SegmentOpened, nil)
	return n
}

// state is a copy of the records, as of a database.
func (n *testNode) state() func() {
	tree, sealed, system, closed, records := n.tree.Encode(), slices.Clone(n.sealed), n.system.clone(), slices.Clone(n.closed), map[session.ID]*chain{}
	for id, c := range n.records {
		records[id] = c.clone()
	}
	return func() {
		var err error
		if n.tree, err = audit.ParseTree(tree); err != nil {
			n.t.Fatal(err)
		}
		n.sealed, n.system, n.closed, n.records = sealed, system, closed, records
	}
}

// nextEvent makes the event that follows h from e.
func nextEvent(h audit.Head, at session.Fence, e audit.Entry, m audit.Moment) (audit.Stored, error) {
	d, err := audit.Prepare(e)
	if err != nil {
		return audit.Stored{}, err
	}
	return d.Chain(h, at, m)
}

func (n *testNode) add(c *chain, a audit.Action, payload any) audit.Stored {
	n.t.Helper()
	e := audit.Entry{Action: a, Outcome: audit.OK, Actor: auditActor, Payload: payload}
	s, err := nextEvent(c.head, session.Fence{Node: n.name}, e, auditMoment)
	if err != nil {
		n.t.Fatal(err)
	}
	counts := c.head.Counts
	c.head = s.Head()
	c.head.Counts = counts
	counts[a]++
	c.events = append(c.events, s)
	return s
}

// session adds the record of a session that runs.
func (n *testNode) session() session.ID {
	n.t.Helper()
	id := session.NewID()
	c := &chain{head: audit.Start(audit.SessionRecord(id), "")}
	c.head.Counts = map[audit.Action]uint64{}
	n.records[id] = c
	n.add(c, audit.SessionCreated, nil)
	n.add(c, audit.SessionRunning, map[string]string{"template": "base"})
	return id
}

// end seals the record of a session.
func (n *testNode) end(id session.ID, residuals ...string) {
	n.t.Helper()
	c := n.records[id]
	n.add(c, audit.SessionEnding, nil)
	n.add(c, audit.SessionEnded, nil)
	seal, err := n.signer.Seal(c.head, n.heads(), audit.Closeout{Session: id, Owner: auditActor, Reason: session.Requested,
		SealedAt: auditMoment.Now, CreatedAt: auditMoment.Now, EndedAt: auditMoment.Now, Residuals: residuals})
	if err != nil {
		n.t.Fatal(err)
	}
	c.seals = append(c.seals, seal)
	n.tree.Append(c.head.Leaf())
	n.sealed = append(n.sealed, audit.ListedRecord{Record: c.head.Record, Seq: c.head.Seq, Hash: c.head.Hash, Sealed: true})
}

// closeSegment seals the open segment of the system record and opens the next.
func (n *testNode) closeSegment() {
	n.t.Helper()
	n.add(n.system, audit.SegmentClosed, nil)
	seal, err := n.signer.SealSegment(n.system.head, n.heads(), audit.SegmentCloseout{OpenedAt: auditMoment.Now, SealedAt: auditMoment.Now})
	if err != nil {
		n.t.Fatal(err)
	}
	n.system.seals = []audit.Seal{seal}
	head := n.system.head
	n.tree.Append(head.Leaf())
	n.sealed = append(n.sealed, audit.ListedRecord{Record: head.Record, Seq: head.Seq, Hash: head.Hash, Sealed: true})
	n.closed = append(n.closed, n.system)
	n.system = &chain{head: audit.Start(audit.SystemRecord(n.name, uint64(len(n.closed)+1)), head.Root())}
	n.system.head.Counts = map[audit.Action]uint64{}
	n.add(n.system, audit.SegmentOpened, nil)
}

func (n *testNode) heads() audit.Heads {
	var open []audit.OpenHead
	for _, c := range n.records {
		if len(c.seals) == 0 {
			open = append(open, audit.OpenHead{Record: c.head.Record, Seq: c.head.Seq, Hash: c.head.Hash})
		}
	}
	return audit.NewHeads(n.name, auditMoment.Now, n.tree, open,
		audit.OpenHead{Record: n.system.head.Record, Seq: n.system.head.Seq, Hash: n.system.head.Hash})
}

func (n *testNode) each(events []audit.Stored) audit.Each {
	return func(yield func(audit.Stored) error) error {
		for _, e := range events {
			if err := yield(e); err != nil {
				return err
			}
		}
		return nil
	}
}

// export returns the export of a session's record.
func (n *testNode) export(id session.ID) string {
	n.t.Helper()
	c := n.records[id]
	x := audit.SessionExport{Session: id, Rotations: n.signer.Rotations(), Events: n.each(c.events)}
	if len(c.seals) > 0 {
		x.Seal = &c.seals[0]
	}
	if len(c.addenda) > 0 {
		x.Addenda, x.AddendaSeal = n.each(c.addenda), &c.seals[len(c.seals)-1]
	}
	var b bytes.Buffer
	if err := audit.Export(&b, x); err != nil {
		n.t.Fatal(err)
	}
	return b.String()
}

func (n *testNode) exportSystem() string {
	n.t.Helper()
	var segments []audit.SegmentExport
	for _, c := range n.closed {
		segments = append(segments, audit.SegmentExport{Events: n.each(c.events), Seal: &c.seals[0]})
	}
	segments = append(segments, audit.SegmentExport{Events: n.each(n.system.events)})
	var b bytes.Buffer
	err := audit.ExportSystem(&b, audit.SystemExport{Node: n.name, Rotations: n.signer.Rotations(), Segments: segments})
	if err != nil {
		n.t.Fatal(err)
	}
	return b.String()
}

func (n *testNode) key() client.AuditKey {
	k := client.AuditKey{Algorithm: "ed25519", PublicKey: string(n.signer.Public().Export()), Fingerprint: n.signer.Public().Fingerprint()}
	for _, s := range n.signer.Rotations() {
		r, err := s.Rotation()
		if err != nil {
			n.t.Fatal(err)
		}
		raw, err := json.Marshal(s)
		if err != nil {
			n.t.Fatal(err)
		}
		k.Former = append(k.Former, client.FormerKey{Fingerprint: r.Old, ReplacedAt: r.Time, Lost: r.Lost})
		k.Rotations = append(k.Rotations, raw)
	}
	return k
}

func (n *testNode) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n.traces = append(n.traces, r.Header.Get("Traceparent"))
	answer := func(v any) {
		if err := json.NewEncoder(w).Encode(v); err != nil {
			n.t.Error(err)
		}
	}
	switch path := r.URL.Path; {
	case path == "/v1/audit/system":
		io.WriteString(w, n.exportSystem())
	case path == "/v1/audit/head":
		seal, err := n.signer.SignHeads(n.heads())
		if err != nil {
			n.t.Error(err)
		}
		answer(seal)
	case path == "/v1/audit/listing":
		for _, l := range n.sealed {
			answer(l)
		}
		for _, h := range n.heads().Open {
			answer(audit.ListedRecord{Record: h.Record, Seq: h.Seq, Hash: h.Hash})
		}
		answer(audit.ListedRecord{Record: n.system.head.Record, Seq: n.system.head.Seq, Hash: n.system.head.Hash})
	case path == "/v1/audit/key":
		answer(n.key())
	case path == "/v1/audit/key/rotate" && r.Method == "POST":
		next, err := n.signer.Rotate(n.dir)
		if err != nil {
			n.t.Error(err)
		}
		n.signer = next
		answer(n.key())
	case strings.HasSuffix(path, "/record"):
		id := session.ID(strings.Split(path, "/")[3])
		if other := n.answers[id]; other != "" {
			id = other
		}
		if n.records[id] == nil {
			w.WriteHeader(http.StatusNotFound)
			answer(client.Error{Code: client.CodeNotFound, Message: "session " + string(id) + " does not exist", Field: "session"})
			return
		}
		io.WriteString(w, n.export(id))
	default:
		w.WriteHeader(http.StatusNotFound)
		answer(client.Error{Code: client.CodeNotFound, Message: "no route " + path})
	}
}

// auditHost is a machine whose command line uses a testNode.
type auditHost struct {
	t    *testing.T
	node *testNode
	dir  string
	eng  Engine
}

func newAuditHost(t *testing.T) *auditHost {
	t.Helper()
	h := &auditHost{t: t, node: newTestNode(t), dir: t.TempDir()}
	s := httptest.NewServer(h.node)
	t.Cleanup(s.Close)
	conf := filepath.Join(h.dir, "config.yaml")
	h.write("config.yaml", "data_dir: "+h.node.dir+"\nrun_dir: "+h.dir+"/run\n")
	for name, value := range map[string]string{"BIVY_CONFIG": conf, "HOME": h.dir, "XDG_CONFIG_HOME": h.dir + "/settings", "BIVY_SERVER": s.URL, "BIVY_API_KEY": "k"} {
		t.Setenv(name, value)
	}
	cfg, err := config.Load(conf)
	if err != nil {
		t.Fatal(err)
	}
	if cfg.WithDefaults().SignerDir() != h.node.dir {
		t.Fatalf("the key is looked for in %s", cfg.WithDefaults().SignerDir())
	}
	return h
}

func (h *auditHost) write(name, text string) string {
	h.t.Helper()
	path := filepath.Join(h.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		h.t.Fatal(err)
	}
	return path
}

// run runs bivy and returns exit code, standard output and standard error.
func (h *auditHost) run(args ...string) (int, string, string) {
	h.t.Helper()
	var files [2]*os.File
	for i := range files {
		f, err := os.Create(filepath.Join(h.t.TempDir(), "stream"))
		if err != nil {
			h.t.Fatal(err)
		}
		defer f.Close()
		files[i] = f
	}
	code := Main(context.Background(), h.eng, args, Streams{In: os.Stdin, Out: files[0], Err: files[1]})
	var texts [2]string
	for i, f := range files {
		b, err := os.ReadFile(f.Name())
		if err != nil {
			h.t.Fatal(err)
		}
		texts[i] = string(b)
	}
	return code, texts[0], texts[1]
}

// want runs bivy and checks the exit code and that the outputs contain texts.
func (h *auditHost) want(code int, texts []string, args ...string) string {
	h.t.Helper()
	got, out, errs := h.run(args...)
	if got != code {
		h.t.Errorf("bivy %s: exit code %d, want %d\n%s%s", strings.Join(args, " "), got, code, out, errs)
	}
	for _, text := range texts {
		if !strings.Contains(out+errs, text) {
			h.t.Errorf("bivy %s: %q is not in\n%s%s", strings.Join(args, " "), text, out, errs)
		}
	}
	if strings.Contains(errs, "bad record: ") && strings.Contains(errs, "bivy: ") {
		h.t.Errorf("bivy %s prints its error twice\n%s", strings.Join(args, " "), errs)
	}
	if code != 0 && strings.Contains(out, "verified:") {
		h.t.Errorf("bivy %s fails and says\n%s", strings.Join(args, " "), out)
	}
	return out
}

func TestVerifyVerdict(t *testing.T) {
	h := newAuditHost(t)
	n := h.node
	plain, other := n.session(), n.session()
	n.end(plain)
	qualified := n.session()
	n.add(n.records[qualified], audit.FileChangesCut, map[string]int{"unlisted": 7})
	n.end(qualified, "one process may still run")
	n.end(other)
	file := h.write("record", n.export(plain))

	h.want(0, []string{"verified: session " + string(plain), "4 events", "0 addenda", "sealed 2026-01-02T03:04:05Z", n.signer.Public().Fingerprint()},
		"audit", "verify", file)
	h.want(0, []string{"verified: session " + string(plain)}, "audit", "verify", string(plain))
	h.want(0, []string{"1 residual", "one process may still run", "the list of changed files is incomplete"}, "audit", "verify", string(qualified))
	h.want(0, []string{`"verified": true`, `"cuts": 1`, `"residuals": 1`, `"addenda": 0`, `"session": "` + string(qualified)}, "audit", "verify", "-o", "json", string(qualified))

	// A genuine record of another session does not answer the question.
	h.want(0, nil, "audit", "verify", "--session", string(plain), file)
	h.want(1, []string{"bad record: ", string(other)}, "audit", "verify", "--session", string(other), file)
	h.want(2, []string{"bivy: --session: ", "is not a session id"}, "audit", "verify", "--session", "x", file)
	n.answers[plain] = other
	h.want(1, []string{"bad record: ", string(other)}, "audit", "verify", string(plain))
	t.Chdir(h.dir)
	h.write(string(plain), n.export(other))
	h.want(1, []string{"bad record: ", string(other)}, "audit", "verify", string(plain))

	// A record that runs is accepted on request only.
	open := n.session()
	h.want(1, []string{"bad record: "}, "audit", "verify", string(open))
	h.want(0, []string{"not sealed"}, "audit", "verify", "--open", string(open))

	// A change is found, also in JSON.
	changed := h.write("changed", strings.Replace(n.export(qualified), "session.running", "session.runninG", 1))
	h.want(1, []string{"bad record: event 2 ("}, "audit", "verify", changed)
	h.want(1, []string{`"verified": false`, `"event": 2`, `"why": `}, "audit", "verify", "-o", "json", changed)
}

func TestVerifyErased(t *testing.T) {
	h := newAuditHost(t)
	n := h.node
	announced, silent := n.session(), n.session()
	for _, id := range []session.ID{announced, silent} {
		c := n.records[id]
		if id == announced {
			e := audit.Entry{Action: audit.PayloadErased, Outcome: audit.OK, Actor: auditActor, Object: audit.ErasedEvents(2, 2)}
			s, err := nextEvent(c.head, session.Fence{Node: n.name}, e, auditMoment)
			if err != nil {
				t.Fatal(err)
			}
			counts := c.head.Counts
			counts[audit.PayloadErased]++
			c.head, c.events = s.Head(), append(c.events, s)
			c.head.Counts = counts
		}
		n.end(id)
		c.events[1].Salt, c.events[1].Payload = nil, nil
	}
	h.want(1, []string{"bad record: ", "1 payload", "--allow-erased"}, "audit", "verify", string(announced))
	h.want(1, []string{`"verified": false`, `"hint": "to accept`}, "audit", "verify", "-o", "json", string(announced))
	h.want(0, []string{"verified: ", "1 payload"}, "audit", "verify", "--allow-erased", string(announced))
	h.want(1, []string{"bad record: "}, "audit", "verify", string(silent))
	h.want(1, []string{"bad record: event 2 ("}, "audit", "verify", "--allow-erased", string(silent))
}

func TestVerifySystem(t *testing.T) {
	h := newAuditHost(t)
	n := h.node
	n.add(n.system, "server.started", nil) // an action that the verifier does not know
	h.want(0, []string{"system record of node node-1", "2 events in 1 segment", "sealed"}, "audit", "verify", "--system")
	h.want(0, []string{`"verified": true`, `"node": "node-1"`, `"events": 2`, `"unsealed": 2`}, "audit", "verify", "--system", "-o", "json")
	file := filepath.Join(h.dir, "system")
	h.want(0, nil, "audit", "export", "--system", "-f", file)
	h.want(1, []string{"exists"}, "audit", "export", "--system", "-f", file)
	h.want(0, []string{"2 events"}, "audit", "verify", "--system", file)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	changed := h.write("changed", strings.Replace(string(text), "server.started", "server.startEd", 1))
	h.want(1, []string{"bad record: segment 1, event 2 ("}, "audit", "verify", "--system", changed)
	if out := h.want(0, nil, "audit", "export", "--system"); out != string(text) {
		t.Errorf("the export on standard output is %q", out)
	}
}

// TestVerifyHead changes the records of a node after a signed head was kept.
func TestVerifyHead(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(n *testNode, older func(), sealed, open session.ID)
		want   string // of the error; empty: verified
	}{
		{"nothing", func(*testNode, func(), session.ID, session.ID) {}, ""},
		{"work went on", func(n *testNode, _ func(), _, open session.ID) {
			n.add(n.records[open], audit.CommandSignalled, nil)
			n.end(open)
			n.end(n.session())
			n.add(n.system, "server.stopped", nil)
		}, ""},
		{"an older database was restored", func(n *testNode, older func(), _, _ session.ID) { older() }, "system/node-1/1 had 2 events and has 1"},
		{"an older database was restored and went on", func(n *testNode, older func(), _, _ session.ID) {
			older()
			n.end(n.session())
			n.end(n.session())
			n.end(n.session())
		}, "was changed, removed or reordered"},
		{"a sealed session was deleted", func(n *testNode, _ func(), sealed, _ session.ID) {
			delete(n.records, sealed)
			n.sealed = slices.DeleteFunc(n.sealed, func(l audit.ListedRecord) bool { return l.Record == audit.SessionRecord(sealed) })
		}, "sealed"},
		{"an open session was deleted", func(n *testNode, _ func(), _, open session.ID) { delete(n.records, open) }, "is missing"},
		{"an open record was cut", func(n *testNode, _ func(), _, open session.ID) {
			c := n.records[open]
			c.events = c.events[:len(c.events)-1]
			c.head = c.events[len(c.events)-1].Head()
		}, "had 3 events and has 2"},
		{"an open record was cut and went on", func(n *testNode, _ func(), _, open session.ID) {
			c := n.records[open]
			c.events = c.events[:len(c.events)-1]
			counts := c.head.Counts
			c.head = c.events[len(c.events)-1].Head()
			c.head.Counts = counts
			n.add(c, audit.CommandSignalled, nil)
			n.add(c, audit.CommandSignalled, nil)
		}, "session/"},
		{"the system record was cut and went on", func(n *testNode, _ func(), _, _ session.ID) {
			c := n.system
			c.events = c.events[:len(c.events)-1]
			c.head = c.events[len(c.events)-1].Head()
			c.head.Counts = map[audit.Action]uint64{}
			n.add(c, "server.started", nil)
			n.add(c, "server.started", nil)
		}, "segment 1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newAuditHost(t)
			n := h.node
			first := n.session()
			n.end(first)
			older := n.state()
			sealed, open := n.session(), n.session()
			n.add(n.records[open], audit.CommandSignalled, nil)
			n.add(n.system, "server.started", nil)
			n.end(sealed)
			_, statement, _ := h.run("audit", "head")
			head := h.write("head.json", statement)
			tt.change(n, older, sealed, open)
			if tt.want == "" {
				h.want(0, []string{"system record of node node-1", "head of 2026-01-02T03:04:05Z: all 2 seals are still there"}, "audit", "verify", "--system", "--head", head)
				h.want(0, []string{`"sealed": 2`}, "audit", "verify", "--system", "--head", head, "-o", "json")
			} else {
				h.want(1, []string{"bad record: ", tt.want}, "audit", "verify", "--system", "--head", head)
			}
		})
	}
}

// TestVerifyHeadOfExport takes the statement from the seal in an export.
func TestVerifyHeadOfExport(t *testing.T) {
	h := newAuditHost(t)
	n := h.node
	n.end(n.session())
	older := n.state()
	kept := n.session()
	n.end(kept)
	file := h.write("kept", n.export(kept))
	h.want(0, []string{"all 1 seals are still there, 1 were made since"}, "audit", "verify", "--system", "--head", file)
	n.end(n.session())
	h.want(0, []string{"all 1 seals are still there, 2 were made since"}, "audit", "verify", "--system", "--head", file)
	older()
	h.want(1, []string{"bad record: session/" + string(kept), "is missing"}, "audit", "verify", "--system", "--head", file)
	h.want(2, []string{"--head", "has no seal"}, "audit", "verify", "--system", "--head", h.write("open", n.exportSystem()))
	h.want(1, []string{"bad record: "}, "audit", "verify", "--system", "--head", h.write("forged", strings.Replace(n.export(n.session()), "session.running", "session.runninG", 1)))
}

// TestVerifyHeadOfSystemExport takes the statement from the newest seal of an
// export of the system record.
func TestVerifyHeadOfSystemExport(t *testing.T) {
	h := newAuditHost(t)
	n := h.node
	n.end(n.session())
	first := h.write("first", n.exportSystem())
	older := n.state()
	n.closeSegment()
	n.add(n.system, "server.started", nil)
	kept := h.write("kept", n.exportSystem())
	n.add(n.system, "server.stopped", nil)
	h.want(0, []string{"5 events in 2 segment", "all 1 seals are still there, 1 were made since"}, "audit", "verify", "--system", "--head", kept)
	_, statement, _ := h.run("audit", "head")
	head := h.write("head", statement)
	h.want(0, []string{"2 seals are still there"}, "audit", "verify", "--system", "--head", head)
	// An earlier export does not contain what the statement names.
	h.want(1, []string{"bad record: ", "system/node-1/2 is missing"}, "audit", "verify", "--system", "--head", head, first)

	// The open segment is replaced by one of the same length and more.
	whole := n.system
	n.system = &chain{head: audit.Start(whole.head.Record, n.closed[0].head.Root())}
	n.system.head.Counts = map[audit.Action]uint64{}
	n.add(n.system, audit.SegmentOpened, nil)
	n.add(n.system, "server.stopped", nil)
	n.add(n.system, "server.stopped", nil)
	h.want(1, []string{"bad record: segment 2, event 2 (", "was replaced"}, "audit", "verify", "--system", "--head", kept)
	older()
	h.want(1, []string{"bad record: "}, "audit", "verify", "--system", "--head", kept)
}

// TestVerifyHeadAfterRotation accepts the statement of a key that a pinned one
// leads to, and no other.
func TestVerifyHeadAfterRotation(t *testing.T) {
	h := newAuditHost(t)
	n := h.node
	old := h.write("old.pub", string(n.signer.Public().Export()))
	h.want(0, []string{"# current key ed25519:", "# former key " + n.signer.Public().Fingerprint()}, "audit", "key", "rotate")
	n.end(n.session())
	_, statement, _ := h.run("audit", "head")
	head := h.write("head.json", statement)
	h.want(0, []string{"all 1 seals"}, "audit", "verify", "--system", "--head", head, "--key", old)
	strange := h.write("strange.pub", string(audit.GenerateSigner().Public().Export()))
	h.want(1, []string{"bad record: ", "not signed by a pinned key"}, "audit", "verify", "--system", "--head", head, "--key", strange)
	h.want(1, []string{"bad record: "}, "audit", "verify", "--system", "--head", h.write("none", "{}"))
}

func TestAuditKey(t *testing.T) {
	h := newAuditHost(t)
	out := h.want(0, []string{"# current key " + h.node.signer.Public().Fingerprint()}, "audit", "key")
	keys, err := audit.ParsePublicKeys([]byte(out))
	if err != nil || len(keys) != 1 || keys[0].Fingerprint() != h.node.signer.Public().Fingerprint() {
		t.Errorf("the output is not a file of keys: %v\n%s", err, out)
	}
	h.want(0, []string{`"fingerprint": "ed25519:`}, "audit", "key", "-o", "json")
	h.want(2, []string{`unexpected argument "x"`}, "audit", "key", "x")

	// Without a server the engine replaces a key that was lost.
	t.Setenv("BIVY_SERVER", "")
	h.want(1, []string{"this build of bivy has no way to replace a lost key"}, "audit", "key", "rotate", "--lost")
	if err := os.Remove(filepath.Join(h.node.dir, audit.SigningKeyFile)); err != nil {
		t.Fatal(err)
	}
	h.eng.ReplaceLostKey = func(_ context.Context, cfg config.Config) (client.AuditKey, error) {
		s, err := audit.RotateLost(cfg.SignerDir())
		if err != nil {
			return client.AuditKey{}, err
		}
		return client.AuditKey{PublicKey: string(s.Public().Export()), Fingerprint: s.Public().Fingerprint(),
			Former: []client.FormerKey{{Fingerprint: "ed25519:old", Lost: true}}}, nil
	}
	h.want(0, []string{"# current key ed25519:", "# former key ed25519:old, lost: it did not sign its successor"}, "audit", "key", "rotate", "--lost")
	h.want(1, []string{"is not lost", "hint: "}, "audit", "key", "rotate", "--lost")
}

func TestVerifyUsage(t *testing.T) {
	h := newAuditHost(t)
	h.want(2, []string{"bivy: missing argument FILE"}, "audit", "verify")
	h.want(2, []string{`bivy: unexpected argument "b"`}, "audit", "verify", "a", "b")
	h.want(2, []string{`bivy: unexpected argument "b"`}, "audit", "verify", "--system", "a", "b")
	h.want(2, []string{"bivy: --head: can only be used with --system"}, "audit", "verify", "--head", "x", "y")
	h.want(2, []string{"bivy: --session: cannot be used with --system"}, "audit", "verify", "--system", "--session", "x")
	h.want(2, []string{"bivy: --open: cannot be used with --system"}, "audit", "verify", "--system", "--open")
	h.want(2, []string{`bivy: unexpected argument "x"`}, "audit", "export", "--system", "x")
	h.want(2, []string{"bivy: missing argument SESSION"}, "audit", "export")
	h.want(2, []string{"bivy: --head: ", "no such file"}, "audit", "verify", "--system", "--head", "/nowhere")
	h.want(1, []string{"no such file"}, "audit", "verify", "/nowhere")
}

// TestTraceparent: requests carry the traceparent of the environment.
func TestTraceparent(t *testing.T) {
	const parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	h := newAuditHost(t)
	h.want(0, nil, "audit", "key")
	t.Setenv("TRACEPARENT", parent)
	h.want(0, nil, "audit", "key")
	t.Setenv("TRACEPARENT", "nonsense")
	h.want(0, nil, "audit", "key")
	if got := strings.Join(h.node.traces, ","); got != ","+parent+"," {
		t.Errorf("requests carried %q", got)
	}
}

// TestBadRecordKeepsOtherErrors: an error that is not about a record is returned
// unchanged.
func TestBadRecordKeepsOtherErrors(t *testing.T) {
	for _, err := range []error{io.ErrUnexpectedEOF, &client.Error{Code: client.CodeInvalid}, kind.Errorf(kind.Invalid, "x").WithField("--head")} {
		a := &app{}
		if got := a.badRecord(err); got != err || a.quiet { //nolint:errorlint // it must be the same value
			t.Errorf("%v became %v", err, got)
		}
	}
}
