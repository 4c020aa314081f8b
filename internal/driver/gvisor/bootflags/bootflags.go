// Package bootflags is what the driver and the sentries that it starts through
// runsc agree on. It hands them flags, for which runsc has no way: they lie in
// the sandbox's bundle.
//
// runsc takes the guest's view of memory and processors from its own cgroup
// code, which bivy does not use.
package bootflags

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Capabilities is what a running sentry may have, as a bit set and only in
// its own user namespace: CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER and
// FSETID (0 to 4), which gVisor keeps to serve files, and SYS_PTRACE (19), by
// which systrap drives its stubs.
const Capabilities uint64 = 0b11111 | 1<<19

// WireGuestFD and WireHostFD are the two ends of the sandbox's wire in every
// sentry: numbers that nothing else has so early, and that stay taken.
const (
	WireGuestFD = 100
	WireHostFD  = 101
)

const file = "boot-flags.json"

// Write puts flags, each "--name=value", into a bundle.
func Write(bundle string, flags []string) error {
	b, err := json.Marshal(flags)
	if err != nil {
		return err
	}
	// For everyone: the sentry is not root.
	return os.WriteFile(filepath.Join(bundle, file), b, 0o644)
}

// Apply returns the arguments of a sentry with the flags of its bundle in
// place of those of the same names; without such a file, args as they are.
func Apply(args []string) ([]string, error) {
	bundle := ""
	for _, a := range args {
		if b, ok := strings.CutPrefix(a, "--bundle="); ok {
			bundle = b
		}
	}
	b, err := os.ReadFile(filepath.Join(bundle, file))
	if errors.Is(err, fs.ErrNotExist) {
		return args, nil
	}
	if err != nil {
		return nil, err
	}
	var flags []string
	if err := json.Unmarshal(b, &flags); err != nil {
		return nil, err
	}
	return replace(args, flags), nil
}

func replace(args, flags []string) []string {
	boot := slices.Index(args, "boot")
	out := append(slices.Clone(args[:boot+1]), flags...)
	for i := boot + 1; i < len(args); i++ {
		name, _, joined := strings.Cut(args[i], "=")
		if !slices.ContainsFunc(flags, func(f string) bool { return strings.HasPrefix(f, name+"=") }) {
			out = append(out, args[i])
		} else if !joined {
			i++ // its value was the next argument
		}
	}
	return out
}
