package api_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"bivy/client"
	"bivy/internal/api"
	"bivy/internal/audit"
)

// TestSystemRecord reads the record of the node through the interface, rotates
// the key, and finds a statement held from before in the records of after.
func TestSystemRecord(t *testing.T) {
	s := serve(t)
	ctx := t.Context()
	pinned := []audit.PublicKey{s.b.PublicKey()}
	first := s.session(t)
	if _, err := first.End(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := s.CreateKey(ctx, client.CreateKey{Role: client.Developer, Label: "ci"}); err != nil {
		t.Fatal(err)
	}
	held, err := s.AuditHead(ctx)
	if err != nil {
		t.Fatal(err)
	}
	heads, _, err := audit.OpenHeads(held, pinned, nil)
	if err != nil || heads.Sealed == 0 {
		t.Fatalf("%+v, %v", heads, err)
	}
	before, err := s.AuditKey(ctx)
	if err != nil || before.Fingerprint != pinned[0].Fingerprint() || before.PublicKey != string(pinned[0].Export()) || len(before.Former) != 0 {
		t.Errorf("key before: %+v, %v", before, err)
	}
	after, err := s.RotateAuditKey(ctx, client.RotateAuditKey{})
	if err != nil || after.Fingerprint == before.Fingerprint || len(after.Former) != 1 || len(after.Rotations) != 1 {
		t.Fatalf("key after: %+v, %v", after, err)
	}
	if f := after.Former[0]; f.Fingerprint != before.Fingerprint || f.PublicKey != before.PublicKey || f.Lost || f.ReplacedAt.IsZero() {
		t.Errorf("former key: %+v", f)
	}
	second := s.session(t)
	if _, err := second.End(ctx); err != nil {
		t.Fatal(err)
	}

	r, err := s.SystemRecord(ctx)
	if err != nil {
		t.Fatal(err)
	}
	export, err := io.ReadAll(r)
	r.Close()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := audit.VerifySystem(bytes.NewReader(export), pinned, audit.VerifyOptions{AllowOpen: true}); err != nil {
		t.Errorf("the system record does not verify: %v", err)
	}
	for _, a := range []audit.Action{audit.KeyCreateIntent, audit.KeyCreated, audit.SigningKeyReplaced} {
		if !bytes.Contains(export, []byte(`\"action\":\"`+string(a)+`\"`)) {
			t.Errorf("the system record has no %s", a)
		}
	}
	// What the new key has sealed is good for those who trust the old one.
	rec, err := second.Record(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer rec.Close()
	if report, err := audit.Verify(rec, pinned, audit.VerifyOptions{}); err != nil || report.Key != after.Fingerprint {
		t.Errorf("a record sealed after the rotation: %+v, %v", report, err)
	}
	listing := func(leaveOut string) error {
		_, err := audit.VerifyHeads(heads, func(fn func(audit.ListedRecord) error) error {
			for l, err := range s.RecordListing(ctx) {
				if err != nil {
					return err
				}
				if strings.HasSuffix(l.Record, leaveOut) && leaveOut != "" {
					continue
				}
				if err := fn(audit.ListedRecord{Record: audit.RecordID(l.Record), Seq: l.Seq, Hash: l.Hash, Sealed: l.Sealed}); err != nil {
					return err
				}
			}
			return nil
		})
		return err
	}
	if err := listing(""); err != nil {
		t.Errorf("the listing does not continue the statement: %v", err)
	}
	if err := listing(first.ID); err == nil {
		t.Error("a listing without a record that the statement covers passes")
	}
}

// TestRefusedDownload: an error is not told to browsers as a file.
func TestRefusedDownload(t *testing.T) {
	s := serve(t)
	_, e, h := s.raw(t, "GET", "/v1/sessions/aaaaaaaaaaaaaaaaaaaa/record", "", "")
	if e.Code != client.CodeNotFound || h.Get("Content-Disposition") != "" || h.Get("Content-Type") != "application/json" {
		t.Errorf("%+v with %v", e, h)
	}
}

// TestIdempotencyDigestIsKeyed: what is stored of a create is no plain hash
// over values, from which short ones could be guessed.
func TestIdempotencyDigestIsKeyed(t *testing.T) {
	in := client.CreateSession{Spec: client.Spec{Env: map[string]string{"PIN": "1234"}}}
	b, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b)
	one, err := api.DigestOf([]byte("one key of thirty-two bytes or so"), in)
	if err != nil {
		t.Fatal(err)
	}
	two, err := api.DigestOf([]byte("two key of thirty-two bytes or so"), in)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := api.DigestOf([]byte("one key of thirty-two bytes or so"), in); err != nil || again != one {
		t.Errorf("the same request has the digests %s and %s (%v)", one, again, err)
	}
	if one == two || strings.Contains(one, hex.EncodeToString(sum[:])) {
		t.Errorf("the digest does not depend on the key: %s, %s", one, two)
	}
	o := serve(t).b.Options()
	o.DigestKey = o.DigestKey[:31]
	if _, err := api.New(o); err == nil {
		t.Error("a digest key that is too short is taken")
	}
}

// TestLoginsAreCounted: refused logins come into the record of the node, with
// where they came from and without what was sent.
func TestLoginsAreCounted(t *testing.T) {
	s := serve(t)
	sent := "e2b_" + strings.Repeat("0", 40)
	for range 3 {
		if status, _, _ := s.raw(t, "GET", "/v1/version", "", "", "Authorization", "Bearer "+sent); status != http.StatusUnauthorized {
			t.Fatal(status)
		}
	}
	if err := s.b.Flush(); err != nil { // as at the end of the process
		t.Fatal(err)
	}
	var found *audit.Stored
	all, err := s.b.Store.Segments(t.Context(), "node-test")
	if err != nil {
		t.Fatal(err)
	}
	stop := errors.New("stop")
	for _, segment := range all {
		err := s.b.Store.SegmentEvents(t.Context(), "node-test", segment.Number, 0, 0, func(e audit.Stored) error {
			if e.Event.Action == audit.LoginRefused {
				found = &e
				return stop
			}
			return nil
		})
		if err != nil && !errors.Is(err, stop) {
			t.Fatal(err)
		}
	}
	if found == nil {
		t.Fatal("refused logins are not recorded")
	}
	p := string(found.Payload)
	if !strings.Contains(p, `"reason":"unknown key"`) || !strings.Contains(p, `"who":"127.0.0.1"`) || !strings.Contains(p, `"count":3`) || strings.Contains(p, sent) {
		t.Errorf("recorded: %s", p)
	}
}
