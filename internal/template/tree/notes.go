package tree

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// maxExamples is how many paths a note lists; others are only counted.
const maxExamples = 5

// Notes collects what a build left out, by reason. The zero value is ready for use.
type Notes struct {
	byReason map[string]*note
}

type note struct {
	count    int
	examples []string
}

// Add notes that path was left out for reason.
func (n *Notes) Add(reason, path string) {
	if n.byReason == nil {
		n.byReason = map[string]*note{}
	}
	x := n.byReason[reason]
	if x == nil {
		x = &note{}
		n.byReason[reason] = x
	}
	x.count++
	if len(x.examples) < maxExamples {
		x.examples = append(x.examples, fmt.Sprintf("%.200q", path))
	}
}

// List returns one line per reason, sorted.
func (n *Notes) List() []string {
	var out []string
	for _, reason := range slices.Sorted(maps.Keys(n.byReason)) {
		x := n.byReason[reason]
		line := fmt.Sprintf("%s: %d: %s", reason, x.count, strings.Join(x.examples, ", "))
		if x.count > len(x.examples) {
			line += ", …"
		}
		out = append(out, line)
	}
	return out
}
