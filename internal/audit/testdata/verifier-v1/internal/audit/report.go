package audit

import (
	"fmt"
	"strings"
	"time"
	"unicode"

	"bivy/internal/session"
)

// Report is what a verified session's record is known to say.
type Report struct {
	Record   RecordID          // the record that was verified
	Session  session.ID        // the session that it is of
	Events   uint64            // of the record, without addenda
	Erased   uint64            // events and addenda whose payload was erased, all announced; their skeletons verified
	Open     []Intent          // intents without an outcome; empty when sealed
	Counts   map[Action]uint64 // how often each action occurs, without addenda
	Cuts     uint64            // file.changes_cut events: lists of changed files that are incomplete
	Sealed   bool              // whether there is a seal; the fields below are zero without one
	SealedAt time.Time         // when the seal was made, as it says
	Key      string            // fingerprint of the key that signed the seal
	Pinned   string            // fingerprint of the pinned key that leads to Key through rotations; mostly Key itself
	Closeout Closeout          // what the seal states

	Residuals       int       // what the end could not prove; Closeout.Residuals lists them up to a bound
	Addenda         uint64    // events after the seal
	AddendaSignedAt time.Time // when their newest head was signed, as it says
	AddendaKey      string    // fingerprint of the key that signed it
	OpenAddenda     []Intent  // intents of the addenda without an outcome
	Contained       int       // of VerifyOptions.Contains, those that are of this export and in it
}

// SystemReport is what a verified system record is known to say.
type SystemReport struct {
	Node      session.NodeID    // whose record it is
	Segments  uint64            // in the export
	Sealed    uint64            // of them, sealed: all but the last, or all
	Unsealed  uint64            // events of the segment that is open
	Events    uint64            // of all segments
	Erased    uint64            // events whose payload was erased, all announced
	Open      []Intent          // intents of the open segment without an outcome
	Counts    map[Action]uint64 // how often each action occurs
	SealedAt  time.Time         // when the newest seal was made, as it says; zero: none
	Key       string            // fingerprint of the key that signed it
	Keys      int               // how many keys signed segments
	Closeout  SegmentCloseout   // what the newest seal states; its Heads can be held against a later listing
	Last      OpenHead          // the last event
	Contained int               // of VerifyOptions.Contains, those that are of this export and in it
}

// String says what was verified in the first line and everything that
// qualifies it in further lines. It is fit for a terminal.
func (r Report) String() string {
	var b strings.Builder
	if !r.Sealed {
		fmt.Fprintf(&b, "chain intact: session %s, %s, not sealed: the session has not ended", r.Session, count(r.Events, "event"))
		qualifyIntents(&b, r.Open)
	} else {
		fmt.Fprintf(&b, "verified: session %s, %s, %s, sealed %s, key %s", r.Session, count(r.Events, "event"), addenda(r.Addenda), stamp(r.SealedAt), r.Key)
		if r.Pinned != r.Key {
			fmt.Fprintf(&b, "\nthe key follows from pinned key %s by rotation", r.Pinned)
		}
		if r.Addenda > 0 {
			fmt.Fprintf(&b, "\naddenda last signed %s, key %s", stamp(r.AddendaSignedAt), r.AddendaKey)
		}
		qualifyIntents(&b, r.OpenAddenda)
		if r.Residuals > 0 {
			fmt.Fprintf(&b, "\n%s: the end could not prove", count(uint64(r.Residuals), "residual"))
			for _, text := range r.Closeout.Residuals[:min(len(r.Closeout.Residuals), shownResiduals)] {
				b.WriteString("\n  " + clean(text))
			}
			if more := r.Residuals - shownResiduals; more > 0 {
				fmt.Fprintf(&b, "\n  and %d more", more)
			}
		}
	}
	if r.Cuts > 0 {
		fmt.Fprintf(&b, "\nthe list of changed files is incomplete: %s of %s", count(r.Cuts, "event"), FileChangesCut)
	}
	qualifyErased(&b, r.Erased)
	return b.String()
}

// String says what was verified in the first line and everything that
// qualifies it in further lines. It is fit for a terminal.
func (r SystemReport) String() string {
	var b strings.Builder
	word := "verified"
	if r.Sealed == 0 {
		word = "chain intact"
	}
	fmt.Fprintf(&b, "%s: system record of node %s, %s in %s, ", word, r.Node, count(r.Events, "event"), count(r.Segments, "segment"))
	if r.Sealed == 0 {
		b.WriteString("none sealed")
	} else {
		fmt.Fprintf(&b, "%d sealed, last %s, key %s", r.Sealed, stamp(r.SealedAt), r.Key)
	}
	if r.Keys > 1 {
		fmt.Fprintf(&b, "\n%d keys signed segments", r.Keys)
	}
	if r.Unsealed > 0 {
		fmt.Fprintf(&b, "\nnot sealed yet, so that no signature covers them: the last %s", count(r.Unsealed, "event"))
	}
	qualifyIntents(&b, r.Open)
	qualifyErased(&b, r.Erased)
	return b.String()
}

// shownResiduals is how many residuals a report lists.
const shownResiduals = 20

func qualifyIntents(b *strings.Builder, open []Intent) {
	if len(open) > 0 {
		fmt.Fprintf(b, "\n%s without an outcome, the first: event %d, %s", count(uint64(len(open)), "intent"), open[0].Seq, open[0].Action)
	}
}

func qualifyErased(b *strings.Builder, n uint64) {
	if n > 0 {
		fmt.Fprintf(b, "\n%s erased, as %s announces: what was in them cannot be checked", count(n, "payload"), PayloadErased)
	}
}

// count writes a number with its unit.
func count(n uint64, unit string) string {
	if n == 1 {
		return "1 " + unit
	}
	return fmt.Sprintf("%d %ss", n, unit)
}

func addenda(n uint64) string {
	if n == 1 {
		return "1 addendum"
	}
	return fmt.Sprintf("%d addenda", n)
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// clean replaces characters that control a terminal.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}
