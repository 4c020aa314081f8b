package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"bivy/internal/audit"
	"bivy/internal/session"
)

// step is one part of a flow. Everything it does can be done again, and what
// it makes is found by the session's own name, so that a crash between any
// two lines is mended by running the same list once more.
type step struct {
	name string
	do   func(ctx context.Context) (outcome, error)

	// undo takes back what do may have done, also when do failed half way.
	// Exactly one of undo and noUndo is set.
	undo   func(ctx context.Context) error
	noUndo string

	// joined commits this step's intent together with that of the step before
	// it. Intents are still durable before their effects; there are only fewer
	// waits for the disk.
	joined bool

	// must marks a step that a flow which goes on after failures cannot go
	// past.
	must bool
}

// outcome is what a step has to say for the record.
type outcome struct {
	facts map[string]any
	// residual is what could not be proved; empty when all was. It goes into
	// the seal, from which nothing can be erased: a phrase of this package,
	// with nothing in it that a guest or the host's errors have said.
	residual string
	entries  []audit.Entry // further events, committed with the outcome
}

// residual is what a step could not prove.
type residual struct {
	phrase string // for the seal
	detail string // for people, while the session lasts
}

// undone is the residual of a step that failed, whose event has the error.
func undone(step, detail string) residual {
	return residual{phrase: "the end's step " + step + " failed; its event in the record says how", detail: detail}
}

// flow runs steps for one session and keeps the record of it.
type flow struct {
	m       *Manager
	name    string // "create", "end"
	id      session.ID
	sandbox session.SandboxID
	actor   session.Principal

	// goOn notes failures as residuals instead of stopping at the first.
	goOn bool

	owed     []audit.Entry   // outcomes that go into the next commit
	intended map[string]bool // steps whose intent is durable
	done     map[string]bool // steps whose outcome is in owed or durable
	left     map[string]residual
	order    []string // of left
	tries    map[string]int
	timing   Timing
	reached  int // index of the last step that was begun
}

// commit makes entries durable.
type commit func(ctx context.Context, entries []audit.Entry) error

// stepPayload is the payload of step events.
type stepPayload struct {
	Flow     string         `json:"flow"`
	Step     string         `json:"step"`
	Millis   float64        `json:"ms,omitempty"`
	Error    string         `json:"error,omitempty"`
	Residual string         `json:"residual,omitempty"`
	Facts    map[string]any `json:"facts,omitempty"`
}

func newFlow(m *Manager, name string, id session.ID, sandbox session.SandboxID, actor session.Principal) *flow {
	return &flow{
		m: m, name: name, id: id, sandbox: sandbox, actor: actor, reached: -1,
		intended: map[string]bool{}, done: map[string]bool{}, left: map[string]residual{}, tries: map[string]int{},
	}
}

// run does the steps in order. The first intents are committed with first,
// later ones by appending; outcomes wait in f.owed for the next commit, the
// last ones for the caller's. It returns the error of the step that stopped
// the flow.
func (f *flow) run(ctx context.Context, steps []step, first commit) error {
	write := first
	for i := 0; i < len(steps); {
		j := i + 1
		for j < len(steps) && steps[j].joined {
			j++
		}
		group := steps[i:j]
		if err := f.intend(ctx, group, write); err != nil {
			return err
		}
		write = f.append
		for n := range group {
			if f.done[group[n].name] {
				continue
			}
			f.reached = i + n
			if err := f.one(ctx, &group[n]); err != nil {
				f.unbegun(group[n+1:])
				return err
			}
		}
		i = j
	}
	return nil
}

// intend commits the intents of a group together with the outcomes before.
func (f *flow) intend(ctx context.Context, group []step, write commit) error {
	entries := f.owed
	var fresh []string
	for _, s := range group {
		if !f.done[s.name] && !f.intended[s.name] {
			fresh = append(fresh, s.name)
			entries = append(entries, f.entry(audit.StepIntent, audit.Pending, stepPayload{Flow: f.name, Step: s.name}))
		}
	}
	f.m.hook(f.name + "." + group[0].name + ".intent")
	start := time.Now()
	if err := write(ctx, entries); err != nil {
		return err
	}
	f.timing = append(f.timing, Phase{Name: "record", Took: time.Since(start)})
	f.owed = nil
	for _, name := range fresh {
		f.intended[name] = true
	}
	return nil
}

// one does a single step and owes its outcome. It returns an error only when
// the flow cannot go on.
func (f *flow) one(ctx context.Context, s *step) error {
	f.m.hook(f.name + "." + s.name + ".do")
	start := time.Now()
	out, err := s.do(ctx)
	took := time.Since(start)
	f.m.hook(f.name + "." + s.name + ".done")
	f.timing = append(f.timing, Phase{Name: s.name, Took: took})
	p := stepPayload{Flow: f.name, Step: s.name, Millis: millis(took), Residual: out.residual, Facts: out.facts}
	for _, e := range out.entries {
		e.Actor, e.Sandbox = f.actor, f.sandbox // what a step found is the flow's to tell
		f.owed = append(f.owed, e)
	}
	if err != nil {
		err = fmt.Errorf("%s %s: %w", f.name, s.name, err)
		p.Error = clip(err.Error(), maxErrorText)
		f.tries[s.name]++
		// A step that is retried for hours must not fill the record: the
		// first intent covers every try, and failures are told at growing
		// distances.
		if n := f.tries[s.name]; n&(n-1) == 0 {
			p.Facts = map[string]any{"try": n}
			f.owed = append(f.owed, f.entry(audit.StepFailed, audit.Failed, p))
		}
		f.leave(s.name, undone(s.name, p.Error))
		if !f.goOn || s.must {
			return err
		}
		f.done[s.name] = true
		return nil
	}
	f.done[s.name] = true
	f.owed = append(f.owed, f.entry(audit.StepDone, audit.OK, p))
	if out.residual != "" {
		f.leave(s.name, residual{out.residual, out.residual})
	} else {
		delete(f.left, s.name)
	}
	return nil
}

// unbegun gives an outcome to intents whose steps were not reached. A flow
// that goes on will come back to them, so there the intents stand.
func (f *flow) unbegun(rest []step) {
	if f.goOn {
		return
	}
	for _, s := range rest {
		f.owed = append(f.owed, f.entry(audit.StepFailed, audit.Refused, stepPayload{Flow: f.name, Step: s.name, Error: "not begun"}))
	}
}

// undo takes back, in reverse, every step up to the last one begun. It goes
// on past failures and returns them joined: whoever called it ends the
// session, which tries again. Without its intents in the record it does nothing.
func (f *flow) undo(ctx context.Context, steps []step) error {
	var todo []*step
	for i := f.reached; i >= 0; i-- {
		if steps[i].undo != nil {
			todo = append(todo, &steps[i])
		}
	}
	if len(todo) == 0 {
		return nil
	}
	entries := f.owed
	for _, s := range todo {
		entries = append(entries, f.entry(audit.StepIntent, audit.Pending, stepPayload{Flow: "undo-" + f.name, Step: s.name}))
	}
	f.m.hook(f.name + ".undo.intent")
	if err := f.append(ctx, entries); err != nil {
		return fmt.Errorf("undo %s: refused, because it cannot be recorded: %w", f.name, err)
	}
	f.owed = nil
	var errs []error
	for _, s := range todo {
		f.m.hook(f.name + "." + s.name + ".undo")
		start := time.Now()
		err := s.undo(ctx)
		p := stepPayload{Flow: "undo-" + f.name, Step: s.name, Millis: millis(time.Since(start))}
		if err != nil {
			errs = append(errs, fmt.Errorf("undo %s %s: %w", f.name, s.name, err))
			p.Error = clip(err.Error(), maxErrorText)
			f.owed = append(f.owed, f.entry(audit.StepFailed, audit.Failed, p))
			continue
		}
		f.owed = append(f.owed, f.entry(audit.StepDone, audit.OK, p))
	}
	return errors.Join(errs...)
}

// leave notes what step name could not prove; the last word counts.
func (f *flow) leave(name string, what residual) {
	if _, ok := f.left[name]; !ok {
		f.order = append(f.order, name)
	}
	f.left[name] = what
}

// residuals lists what the flow could not prove, in the order it came up: in
// phrases, for the seal, and in detail.
func (f *flow) residuals() (phrases, details []string) {
	for _, name := range f.order {
		if what, ok := f.left[name]; ok {
			phrases, details = append(phrases, what.phrase), append(details, what.detail)
		}
	}
	return phrases, details
}

func (f *flow) append(ctx context.Context, entries []audit.Entry) error {
	if len(entries) == 0 {
		return nil
	}
	return f.m.append(ctx, f.id, entries...)
}

func (f *flow) entry(a audit.Action, o audit.Outcome, payload any) audit.Entry {
	e := audit.Entry{Action: a, Outcome: o, Actor: f.actor, Sandbox: f.sandbox, Payload: payload}
	if p, ok := payload.(stepPayload); ok {
		e.Ref = p.Flow + "." + p.Step
	}
	return e
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// maxErrorText bounds what an error may add to a record.
const maxErrorText = 2 << 10

// clip cuts text at a character boundary and says so.
func clip(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	cut := limit
	for cut > 0 && s[cut]&0xc0 == 0x80 {
		cut--
	}
	return s[:cut] + fmt.Sprintf("… (%d bytes cut)", len(s)-cut)
}
