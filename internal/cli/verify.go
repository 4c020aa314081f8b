package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"bivy/client"
	"bivy/internal/audit"
	"bivy/internal/config"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// verifyFlags are the flags of audit verify.
type verifyFlags struct {
	keys              []string
	session, head     string
	open, erased, sys bool
}

func (a *app) auditVerify() *cobra.Command {
	var v verifyFlags
	cmd := &cobra.Command{
		Use: "verify [flags] FILE|SESSION|-", Short: "Verify a record",
		Long: `Verify an exported record: that nothing in it was changed, removed, reordered or
added, and that it was sealed with a trusted key. It needs no server; the record
of a SESSION is fetched from the server first, and must be of that session.

The verdict names the session, its events and addenda, the time of the seal and
the key, and everything that qualifies it: what the end could not prove, lists
of changed files that are incomplete, and payloads that were erased.

With --system, verify the system record of the node: that of FILE, else that of
the server. With --head FILE as well, check an earlier signed statement against
the records that the server has now. FILE is the output of bivy audit head, or
the export of a session, whose seal contains such a statement. It finds records
that were deleted, cut or replaced, and an older database that was restored.

Trusted keys are those of --key, else those in signing.pub of this machine's data
directory and in trusted-keys of the user's settings. --key takes a file with
public keys, or the fingerprint of one of these.

Exit codes: 0 the record verifies; 1 it does not, or payloads were erased and
--allow-erased is missing; 2 the command line is wrong.`,
		Example: "  bivy audit verify record.jsonl --key signing.pub\n  bivy audit verify --system --head head.json",
		Args: func(cmd *cobra.Command, args []string) error {
			switch {
			case v.sys && v.session != "":
				return kind.Errorf(kind.Invalid, "cannot be used with --system").WithField("--session")
			case v.sys && v.open:
				return kind.Errorf(kind.Invalid, "cannot be used with --system, which accepts an open segment").WithField("--open")
			case v.sys:
				return atMost(1)(cmd, args)
			case v.head != "":
				return kind.Errorf(kind.Invalid, "can only be used with --system").WithField("--head")
			}
			return want(false, "FILE")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			keys, err := a.pinned(v.keys)
			if err != nil {
				return err
			}
			if v.sys {
				file := ""
				if len(args) > 0 {
					file = args[0]
				}
				return a.verifySystem(cmd.Context(), file, keys, v)
			}
			return a.verifySession(cmd.Context(), args[0], keys, v)
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&v.keys, "key", nil, "`FILE` with public keys, or the fingerprint of a key; may be repeated (default the pinned keys)")
	f.StringVar(&v.session, "session", "", "`ID` of the session that the record must be of (default any)")
	f.BoolVar(&v.open, "open", false, "accept the record of a session that has not ended; nothing signs it")
	f.BoolVar(&v.erased, "allow-erased", false, "accept payloads that were erased, if an event announces it")
	f.BoolVar(&v.sys, "system", false, "verify the system record of the node")
	f.StringVar(&v.head, "head", "", "`FILE` with an earlier signed statement to check against the server's records; with --system")
	return cmd
}

// verifySession verifies the record of a session.
func (a *app) verifySession(ctx context.Context, arg string, keys []audit.PublicKey, v verifyFlags) error {
	o := audit.VerifyOptions{AllowOpen: v.open, AllowErased: v.erased}
	if v.session != "" {
		id, err := session.ParseID(v.session)
		if err != nil {
			return kind.Errorf(kind.Invalid, "%w", err).WithField("--session")
		}
		o.Session = id
	} else if id, err := session.ParseID(arg); err == nil {
		o.Session = id // whether it is read from the server or from a file of that name
	}
	in, err := a.openRecord(ctx, arg)
	if err != nil {
		return err
	}
	defer in.Close()
	r, err := audit.Verify(in, keys, o)
	if err != nil {
		return a.badRecord(err)
	}
	if !a.json() {
		_, err := fmt.Fprintln(a.Out, r.String())
		return err
	}
	return a.printJSON(map[string]any{"verified": true, "record": r.Record, "session": r.Session, "events": r.Events, "addenda": r.Addenda,
		"erased": r.Erased, "residuals": r.Residuals, "cuts": r.Cuts, "open_intents": len(r.Open) + len(r.OpenAddenda),
		"sealed": r.Sealed, "sealed_at": r.SealedAt, "key": r.Key, "pinned": r.Pinned,
		"addenda_signed_at": r.AddendaSignedAt, "addenda_key": r.AddendaKey, "closeout": r.Closeout})
}

// verifySystem verifies the system record of a node, and with --head an earlier
// statement.
func (a *app) verifySystem(ctx context.Context, file string, keys []audit.PublicKey, v verifyFlags) error {
	var c *client.Client
	var held heldHeads
	var found audit.HeadsReport
	if file == "" || v.head != "" {
		var err error
		if c, err = a.connect(ctx, anywhere); err != nil {
			return err
		}
	}
	o := audit.VerifyOptions{AllowErased: v.erased}
	if v.head != "" {
		var err error
		if held, err = a.readHeads(ctx, c, v.head, keys); err != nil {
			return a.badRecord(err)
		}
		if found, err = checkHeads(ctx, c, held, keys); err != nil {
			return a.badRecord(err)
		}
		o.Node = held.Node
		for _, h := range []audit.OpenHead{held.System, held.own} {
			if _, _, ok := h.Record.Segment(); ok && !slices.Contains(o.Contains, h) {
				o.Contains = append(o.Contains, h)
			}
		}
	}
	var in io.ReadCloser
	var err error
	if file == "" {
		in, err = c.SystemRecord(ctx)
	} else {
		in, err = a.openFile(file)
	}
	if err != nil {
		return err
	}
	defer in.Close()
	r, err := audit.VerifySystem(in, keys, o)
	if err != nil {
		return a.badRecord(err)
	}
	if a.json() {
		out := map[string]any{"verified": true, "node": r.Node, "segments": r.Segments, "segments_sealed": r.Sealed, "events": r.Events,
			"unsealed": r.Unsealed, "erased": r.Erased, "open_intents": len(r.Open), "sealed_at": r.SealedAt, "key": r.Key, "keys": r.Keys}
		if v.head != "" {
			out["head"] = map[string]any{"time": held.Time, "sealed": found.Sealed, "since": found.Since, "continued": len(found.Continued), "unlisted": found.Unlisted}
		}
		return a.printJSON(out)
	}
	text := r.String()
	if v.head != "" {
		text += fmt.Sprintf("\nhead of %s: %s", formatTime(held.Time), found)
	}
	_, err = fmt.Fprintln(a.Out, text)
	return err
}

// heldHeads is an earlier signed statement.
type heldHeads struct {
	audit.Heads
	own audit.OpenHead // of the export that the statement was in; zero: it was not in one
}

// maxHeads is the largest file of a signed statement, in bytes.
const maxHeads = 2 << 20

// readHeads reads a signed statement: one that bivy audit head printed, or the
// one in the seal of an export.
func (a *app) readHeads(ctx context.Context, c *client.Client, file string, keys []audit.PublicKey) (heldHeads, error) {
	f, err := a.openFile(file)
	if err != nil {
		return heldHeads{}, kind.Errorf(kind.Invalid, "%w", err).WithField("--head")
	}
	defer f.Close()
	in := bufio.NewReader(f)
	none := func() (heldHeads, error) {
		return heldHeads{}, kind.Errorf(kind.Invalid, "%s has no seal that contains a statement", file).WithField("--head")
	}
	from := func(h audit.Heads, ok bool, err error, own audit.OpenHead) (heldHeads, error) {
		if err == nil && !ok {
			return none()
		}
		return heldHeads{Heads: h, own: own}, err
	}
	const session, system = `{"bivy_record":1,"record":"session/`, `{"bivy_record":1,"record":"system/`
	begin, err := in.Peek(max(len(session), len(system)))
	if err != nil && !errors.Is(err, io.EOF) {
		return heldHeads{}, err
	}
	switch {
	case bytes.HasPrefix(begin, []byte(session)):
		r, err := audit.Verify(in, keys, audit.VerifyOptions{AllowErased: true})
		if err != nil {
			return heldHeads{}, err
		}
		h, ok, err := r.Closeout.Heads()
		return from(h, ok, err, audit.OpenHead{Record: r.Record, Seq: r.Closeout.Log.Last, Hash: r.Closeout.Log.Head})
	case bytes.HasPrefix(begin, []byte(system)):
		r, err := audit.VerifySystem(in, keys, audit.VerifyOptions{AllowErased: true})
		if err != nil {
			return heldHeads{}, err
		}
		if r.Sealed == 0 {
			return none()
		}
		h, ok, err := r.Closeout.Heads()
		return from(h, ok, err, r.Last)
	}
	data, err := io.ReadAll(io.LimitReader(in, maxHeads+1))
	if err != nil {
		return heldHeads{}, err
	}
	// A statement carries no rotations: a key that was replaced since is reached
	// from a pinned one through those of the server, which are signed.
	k, err := c.AuditKey(ctx)
	if err != nil {
		return heldHeads{}, err
	}
	rotations, err := audit.ParseRotations(joinLines(k.Rotations))
	if err != nil {
		return heldHeads{}, err
	}
	h, _, err := audit.OpenHeads(data, keys, rotations)
	return heldHeads{Heads: h}, err
}

// joinLines returns values as JSON lines.
func joinLines(values []json.RawMessage) []byte {
	var b bytes.Buffer
	for _, v := range values {
		b.Write(bytes.TrimSpace(v))
		b.WriteByte('\n')
	}
	return b.Bytes()
}

// checkHeads checks a statement against the records that the server has now.
func checkHeads(ctx context.Context, c *client.Client, held heldHeads, keys []audit.PublicKey) (audit.HeadsReport, error) {
	missing := held.own
	found, err := audit.VerifyHeads(held.Heads, func(fn func(audit.ListedRecord) error) error {
		for r, err := range c.RecordListing(ctx) {
			if err != nil {
				return err
			}
			if audit.RecordID(r.Record) == missing.Record && (r.Seq > missing.Seq || r.Seq == missing.Seq && r.Hash == missing.Hash) {
				missing = audit.OpenHead{}
			}
			if err := fn(audit.ListedRecord{Record: audit.RecordID(r.Record), Seq: r.Seq, Hash: r.Hash, Sealed: r.Sealed}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return found, err
	}
	if missing.Record != "" {
		return found, kind.Errorf(kind.Invalid, "%s, whose export contains the statement, is missing or was changed", missing.Record)
	}
	// A record that has grown since must still contain what it ended with then.
	for _, o := range found.Continued {
		id, ok := o.Record.Session()
		if !ok {
			continue // the system record is verified as a whole
		}
		if err := checkContinued(ctx, c, string(id), o, keys); err != nil {
			var fault *audit.Fault
			if errors.As(err, &fault) { // its line is one of an export that the caller never saw
				err = kind.Errorf(kind.Invalid, "event %d: %s", fault.Seq, fault.Why)
			}
			return found, fmt.Errorf("%s: %w", o.Record, err)
		}
	}
	return found, nil
}

// checkContinued verifies that the record of a session contains an event.
func checkContinued(ctx context.Context, c *client.Client, id string, o audit.OpenHead, keys []audit.PublicKey) error {
	in, err := c.Session(id).Record(ctx)
	if err != nil {
		return err
	}
	defer in.Close()
	_, err = audit.Verify(in, keys, audit.VerifyOptions{Session: session.ID(id), AllowOpen: true, AllowErased: true, Contains: []audit.OpenHead{o}})
	return err
}

// badRecord prints why a record does not verify. Any other error is returned
// unchanged.
func (a *app) badRecord(err error) error {
	if !kind.Is(err, kind.Invalid) || kind.Field(err) != "" {
		return err
	}
	a.quiet = true
	text, why := err.Error(), err.Error()
	var fault *audit.Fault
	out := map[string]any{"verified": false}
	if errors.As(err, &fault) {
		text, why = fault.Error(), fault.Why
		out["record"], out["event"], out["line"] = fault.Record, fault.Seq, fault.Line
	}
	out["why"] = why
	hint := kind.Hint(err)
	if a.json() {
		if hint != "" {
			out["hint"] = hint
		}
		return errors.Join(err, a.printJSON(out))
	}
	fmt.Fprintf(a.Err, "bad record: %s\n", oneLine(text))
	if hint != "" {
		fmt.Fprintf(a.Err, "hint: %s\n", oneLine(hint))
	}
	return err
}

// openRecord opens a file, standard input, or the record of a session.
func (a *app) openRecord(ctx context.Context, arg string) (io.ReadCloser, error) {
	f, err := a.openFile(arg)
	if err == nil {
		return f, nil
	}
	if _, idErr := session.ParseID(arg); idErr != nil || !errors.Is(err, fs.ErrNotExist) {
		return nil, kind.Errorf(kind.Invalid, "%w", err)
	}
	c, err := a.connect(ctx, anywhere)
	if err != nil {
		return nil, err
	}
	return c.Session(arg).Record(ctx)
}

// openFile opens a file; "-" is standard input.
func (a *app) openFile(name string) (io.ReadCloser, error) {
	if name == "-" {
		return io.NopCloser(a.In), nil
	}
	return os.Open(name)
}

// pinned returns the keys whose signatures are trusted: those that --key names,
// else all that are pinned on this machine.
func (a *app) pinned(pins []string) ([]audit.PublicKey, error) {
	var own []audit.PublicKey
	var looked []string
	cfg, err := a.loadConfig()
	if err != nil {
		return nil, err
	}
	places := []string{filepath.Join(cfg.SignerDir(), audit.PublicKeyFile)}
	if dir := config.ClientDir(); dir != "" {
		places = append(places, filepath.Join(dir, "trusted-keys"))
	}
	for _, p := range places {
		looked = append(looked, p)
		keys, err := readKeys(p)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			continue
		}
		if err != nil {
			return nil, err
		}
		own = append(own, keys...)
	}
	if len(pins) == 0 {
		if len(own) == 0 {
			return nil, kind.Errorf(kind.Invalid, "no public key is pinned: looked in %s", strings.Join(looked, " and ")).
				WithHint("specify the file with the public key: --key FILE")
		}
		return own, nil
	}
	var out []audit.PublicKey
	for _, pin := range pins {
		keys, err := readKeys(pin)
		if err == nil {
			out = append(out, keys...)
			continue
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		found := false
		for _, k := range own {
			if k.Fingerprint() == pin {
				out, found = append(out, k), true
			}
		}
		if !found {
			return nil, kind.Errorf(kind.Invalid, "%q is neither a file nor the fingerprint of a key in %s", pin, strings.Join(looked, " or ")).WithField("--key")
		}
	}
	return out, nil
}

func readKeys(path string) ([]audit.PublicKey, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	keys, err := audit.ParsePublicKeys(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return keys, nil
}
