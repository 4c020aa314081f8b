package journal

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"bivy/internal/audit"
	"bivy/internal/clip"
	"bivy/internal/session"
)

// Step is one part of a flow. Everything it does can be done again, and what
// it makes is found by the session's own name, so that after a crash the same
// list can be run again.
type Step struct {
	Name string
	Do   func(ctx context.Context) (Result, error)

	// Undo takes back what Do may have done, also when Do failed half way.
	// Exactly one of Undo and NoUndo is set; NoUndo is the reason why there is
	// nothing to take back.
	Undo   func(ctx context.Context) error
	NoUndo string

	// Joined commits this step's intent together with that of the step before
	// it. Intents are still durable before their effects; there are only fewer
	// waits for the disk.
	Joined bool

	// Must marks a step that a flow which goes on after failures cannot go
	// past.
	Must bool
}

// Result is what a step has to say for the record.
type Result struct {
	Facts map[string]any // of the step's own event
	// Residual is what could not be proved; empty when all was. It goes into
	// the seal, from which nothing can be erased: a fixed phrase of this
	// program, with nothing in it that a guest or an error of the host said.
	Residual string
	Entries  []audit.Entry // further events, committed with the outcome
}

// Unproved is something that a step could not prove.
type Unproved struct {
	Phrase string // for the seal
	Detail string // for people, while the session lasts
}

// failedStep is what a step that failed has left unproved; its event has the
// error.
func failedStep(flow, step, detail string) Unproved {
	return Unproved{Phrase: "step " + step + " of the " + flow + " failed; its event in the record says how", Detail: detail}
}

// Phase is one part of a flow and how long it took.
type Phase struct {
	Name string        `json:"name"`
	Took time.Duration `json:"took"`
}

// Timing is where the time of a flow went, in order.
type Timing []Phase

// Commit makes entries durable and returns the sequence number of the first.
type Commit func(ctx context.Context, entries []audit.Entry) (first uint64, err error)

// Flow runs steps for one session and keeps the record of them. Its methods
// are called by one goroutine at a time.
type Flow struct {
	// Outcomes wait here for the next commit.
	Outcomes []audit.Entry
	// Timing is where the time went.
	Timing Timing

	log      *Log
	name     string
	actor    session.Principal
	decision audit.Decision

	// goOn notes failures as residuals instead of stopping at the first.
	goOn bool

	intents   map[string]uint64 // sequence numbers of durable intents, by step
	done      map[string]bool   // steps whose outcome is in Outcomes or durable
	unproved  map[string]Unproved
	order     []string // of unproved
	tries     map[string]int
	reached   int  // index of the last step that was begun
	uncertain bool // a commit failed: what it has done only the record can tell
}

// FlowOptions are what a Flow is made of.
type FlowOptions struct {
	Name     string // "create", "end"
	Actor    session.Principal
	Decision audit.Decision // on the request that the flow carries out
	// GoOn makes the flow go on after a step that failed, unless the step is
	// marked Must.
	GoOn bool
}

// NewFlow returns a flow that has done nothing.
func (l *Log) NewFlow(o FlowOptions) *Flow {
	return &Flow{
		log: l, name: o.Name, actor: o.Actor, decision: o.Decision, goOn: o.GoOn, reached: -1,
		intents: map[string]uint64{}, done: map[string]bool{}, unproved: map[string]Unproved{}, tries: map[string]int{},
	}
}

// stepPayload is the payload of step events.
type stepPayload struct {
	Flow     string         `json:"flow"`
	Step     string         `json:"step"`
	Millis   float64        `json:"ms,omitempty"`
	Error    string         `json:"error,omitempty"`
	Residual string         `json:"residual,omitempty"`
	Facts    map[string]any `json:"facts,omitempty"`
}

// Begun reports whether an intent of the flow is known to be durable.
func (f *Flow) Begun() bool { return len(f.intents) > 0 }

// Uncertain reports whether a commit of the flow failed, so that only the
// record can tell what it has done. Continue clears it.
func (f *Flow) Uncertain() bool { return f.uncertain }

// Continue makes the flow go on from where a record stops.
func (f *Flow) Continue(h *History) {
	prefix := f.name + "."
	open := map[uint64]bool{}
	for _, i := range h.Intents.Open() {
		open[i.Seq] = true
		if name, ok := strings.CutPrefix(i.Ref, prefix); ok {
			f.intents[name] = i.Seq
		}
	}
	if f.uncertain {
		// The batch that failed was written whole or not at all.
		for _, e := range f.Outcomes {
			if e.Concludes != 0 && !open[e.Concludes] {
				f.Outcomes = nil
				break
			}
		}
		f.uncertain = false
	}
	for _, s := range h.steps {
		name, ok := strings.CutPrefix(s.ref, prefix)
		if !ok {
			continue
		}
		if s.done {
			f.done[name] = true
		}
		switch {
		case s.payload.Error != "":
			f.leave(name, failedStep(f.name, name, s.payload.Error))
		case s.payload.Residual != "":
			f.leave(name, Unproved{s.payload.Residual, s.payload.Residual})
		default:
			delete(f.unproved, name)
		}
	}
}

// Run does the steps in order. The first intents are committed with first,
// later ones by appending; outcomes wait in f.Outcomes for the next commit,
// the last ones for the caller's. It returns the error of the step that
// stopped the flow.
func (f *Flow) Run(ctx context.Context, steps []Step, first Commit) error {
	write := first
	for i := 0; i < len(steps); {
		j := i + 1
		for j < len(steps) && steps[j].Joined {
			j++
		}
		group := steps[i:j]
		if err := f.intend(ctx, group, write); err != nil {
			return err
		}
		write = f.append
		for n := range group {
			if f.done[group[n].Name] {
				continue
			}
			f.reached = i + n
			if err := f.one(ctx, &group[n]); err != nil {
				f.skip(group[n+1:])
				return err
			}
		}
		i = j
	}
	return nil
}

// intend commits the intents of a group together with the outcomes before.
func (f *Flow) intend(ctx context.Context, group []Step, write Commit) error {
	entries := f.Outcomes
	begin := len(entries)
	var fresh []string
	for _, s := range group {
		if !f.done[s.Name] && f.intents[s.Name] == 0 {
			fresh = append(fresh, s.Name)
			entries = append(entries, f.Entry(audit.StepIntent, audit.Pending, stepPayload{Flow: f.name, Step: s.Name}))
		}
	}
	f.log.j.failPoint(f.name + "." + group[0].Name + ".intent")
	start := time.Now()
	seq, err := write(ctx, entries)
	if err != nil {
		f.uncertain = true
		return err
	}
	f.Timing = append(f.Timing, Phase{Name: "record", Took: time.Since(start)})
	f.Outcomes = nil
	for i, name := range fresh {
		f.intents[name] = seq + uint64(begin+i)
	}
	return nil
}

// one does a single step and keeps its outcome for the next commit. It
// returns an error only when the flow cannot go on.
func (f *Flow) one(ctx context.Context, s *Step) error {
	f.log.j.failPoint(f.name + "." + s.Name + ".do")
	start := time.Now()
	out, err := s.Do(ctx)
	took := time.Since(start)
	f.log.j.failPoint(f.name + "." + s.Name + ".done")
	f.Timing = append(f.Timing, Phase{Name: s.Name, Took: took})
	p := stepPayload{Flow: f.name, Step: s.Name, Millis: Millis(took), Residual: out.Residual, Facts: out.Facts}
	for _, e := range out.Entries {
		e.Actor = f.actor // what a step found is the flow's to tell
		f.Outcomes = append(f.Outcomes, e)
	}
	if err == nil {
		f.done[s.Name] = true
		f.Outcomes = append(f.Outcomes, f.outcome(audit.StepDone, audit.OK, p))
		if out.Residual != "" {
			f.leave(s.Name, Unproved{out.Residual, out.Residual})
		} else {
			delete(f.unproved, s.Name)
		}
		return nil
	}
	err = fmt.Errorf("%s %s: %w", f.name, s.Name, err)
	p.Error = clip.Counted(err.Error(), MaxErrorText)
	f.leave(s.Name, failedStep(f.name, s.Name, p.Error))
	if !f.goOn || !s.Must {
		f.Outcomes = append(f.Outcomes, f.outcome(audit.StepFailed, audit.Failed, p))
		f.done[s.Name] = f.goOn
		if f.goOn {
			return nil
		}
		return err
	}
	// The step is tried again under the same intent, perhaps for hours. That
	// must not fill the record: failures are told at growing distances.
	f.tries[s.Name]++
	if n := f.tries[s.Name]; n&(n-1) == 0 {
		p.Facts = map[string]any{"try": n}
		f.Outcomes = append(f.Outcomes, f.Entry(audit.StepFailed, audit.Failed, p))
	}
	return err
}

// skip gives an outcome to intents whose steps were not reached. A flow that
// goes on comes back to them, so that there the intents stand.
func (f *Flow) skip(rest []Step) {
	if f.goOn {
		return
	}
	for _, s := range rest {
		f.Outcomes = append(f.Outcomes, f.outcome(audit.StepFailed, audit.Refused, stepPayload{Flow: f.name, Step: s.Name, Error: "not begun"}))
	}
}

// Undo takes back, in reverse, every step up to the last one begun. It goes
// on past failures and returns them joined: the caller then ends the session,
// and the end is retried. Without its intents in the record it does nothing.
func (f *Flow) Undo(ctx context.Context, steps []Step) error {
	var todo []*Step
	for i := f.reached; i >= 0; i-- {
		if steps[i].Undo != nil {
			todo = append(todo, &steps[i])
		}
	}
	if len(todo) == 0 {
		return nil
	}
	undo := "undo-" + f.name
	entries := f.Outcomes
	begin := len(entries)
	for _, s := range todo {
		entries = append(entries, f.Entry(audit.StepIntent, audit.Pending, stepPayload{Flow: undo, Step: s.Name}))
	}
	f.log.j.failPoint(f.name + ".undo.intent")
	seq, err := f.append(ctx, entries)
	if err != nil {
		f.uncertain = true
		return fmt.Errorf("undo %s: refused, because it cannot be recorded: %w", f.name, err)
	}
	f.Outcomes = nil
	var errs []error
	for i, s := range todo {
		f.log.j.failPoint(f.name + "." + s.Name + ".undo")
		start := time.Now()
		err := s.Undo(ctx)
		p := stepPayload{Flow: undo, Step: s.Name, Millis: Millis(time.Since(start))}
		e := f.Entry(audit.StepDone, audit.OK, p)
		if err != nil {
			err = fmt.Errorf("undo %s %s: %w", f.name, s.Name, err)
			errs = append(errs, err)
			p.Error = clip.Counted(err.Error(), MaxErrorText)
			e = f.Entry(audit.StepFailed, audit.Failed, p)
		}
		e.Concludes = seq + uint64(begin+i)
		f.Outcomes = append(f.Outcomes, e)
	}
	return errors.Join(errs...)
}

// Flush commits the outcomes that wait, followed by more.
func (f *Flow) Flush(ctx context.Context, write Commit, more ...audit.Entry) error {
	if _, err := write(ctx, append(f.Outcomes[:len(f.Outcomes):len(f.Outcomes)], more...)); err != nil {
		f.uncertain = true
		return err
	}
	f.Outcomes = nil
	return nil
}

// leave notes what step name could not prove; a later note replaces an earlier one.
func (f *Flow) leave(name string, what Unproved) {
	if _, ok := f.unproved[name]; !ok {
		f.order = append(f.order, name)
	}
	f.unproved[name] = what
}

// Residuals lists what the flow could not prove, in the order in which it came
// up: in phrases, for the seal, and in detail.
func (f *Flow) Residuals() (phrases, details []string) {
	for _, name := range f.order {
		if what, ok := f.unproved[name]; ok {
			phrases, details = append(phrases, what.Phrase), append(details, what.Detail)
		}
	}
	return phrases, details
}

func (f *Flow) append(ctx context.Context, entries []audit.Entry) (uint64, error) {
	if len(entries) == 0 {
		return 0, nil
	}
	return f.log.j.Append(ctx, f.log.id, f.log.at, entries...)
}

// Entry is an event of the flow.
func (f *Flow) Entry(a audit.Action, o audit.Outcome, payload any) audit.Entry {
	e := audit.Entry{Action: a, Outcome: o, Actor: f.actor, Payload: payload}
	if p, ok := payload.(stepPayload); ok {
		e.Ref = p.Flow + "." + p.Step
		e.Object = "step/" + p.Step
	} else {
		e.Decision = f.decision
	}
	return e
}

// outcome is an event that concludes the intent of a step.
func (f *Flow) outcome(a audit.Action, o audit.Outcome, p stepPayload) audit.Entry {
	e := f.Entry(a, o, p)
	e.Concludes = f.intents[p.Step]
	return e
}

// Millis is a duration in milliseconds, as payloads give it.
func Millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// MaxErrorText bounds what an error may add to a record, in bytes.
const MaxErrorText = 2 << 10
