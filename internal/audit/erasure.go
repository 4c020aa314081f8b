package audit

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// ErasedEvents returns the object of a payload.erased event that announces the
// erasure of the payloads of events first to last of the session's or system
// record.
func ErasedEvents(first, last uint64) string { return fmt.Sprintf("events/%d-%d", first, last) }

// ErasedAddenda returns the object of a payload.erased event, in the addenda,
// that announces the erasure of the payloads of addenda first to last.
func ErasedAddenda(first, last uint64) string { return fmt.Sprintf("addenda/%d-%d", first, last) }

// span is the events first to last of a record or of its addenda.
type span struct {
	first, last uint64
	addenda     bool
}

func parseErasure(object string) (span, error) {
	chain, numbers, ok := strings.Cut(object, "/")
	from, to, dash := strings.Cut(numbers, "-")
	first, err1 := strconv.ParseUint(from, 10, 63)
	last, err2 := strconv.ParseUint(to, 10, 63)
	s := span{first: first, last: last, addenda: chain == "addenda"}
	want := ErasedEvents(first, last)
	if s.addenda {
		want = ErasedAddenda(first, last)
	}
	if !ok || !dash || err1 != nil || err2 != nil || first < 1 || last < first || want != object {
		return span{}, fmt.Errorf(`object %.64q is not "events/<first>-<last>" or "addenda/<first>-<last>"`, object)
	}
	return s, nil
}

// maxSpans bounds what an export can make a verifier remember of erasures.
const maxSpans = 1 << 16

// spans is a set of event numbers as ascending ranges that do not touch.
type spans []span

// add puts the numbers first to last into the set. It fails when the set would
// have more than maxSpans ranges.
func (s *spans) add(first, last uint64) error {
	at, _ := slices.BinarySearchFunc(*s, first, func(e span, n uint64) int {
		if e.last+1 < n {
			return -1
		}
		return 1
	})
	end := at
	for end < len(*s) && (*s)[end].first <= last+1 {
		first, last = min(first, (*s)[end].first), max(last, (*s)[end].last)
		end++
	}
	*s = slices.Replace(*s, at, end, span{first: first, last: last})
	if len(*s) > maxSpans {
		return fmt.Errorf("more than %d separate ranges of erased payloads", maxSpans)
	}
	return nil
}

// missing returns the first number of s that is not in covers, or 0.
func (s spans) missing(covers spans) uint64 {
	for _, want := range s {
		at, _ := slices.BinarySearchFunc(covers, want.first, func(e span, n uint64) int {
			if e.last < n {
				return -1
			}
			return 1
		})
		if at == len(covers) || covers[at].first > want.first {
			return want.first
		}
		if covers[at].last < want.last {
			return covers[at].last + 1
		}
	}
	return 0
}
