package sentry

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"
	_ "unsafe" // for go:linkname

	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/runsc/boot/filter"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"

	"bivy/internal/driver/gvisor/bootflags"
)

//go:generate env CGO_ENABLED=0 go run ./gen

// settle is how long after its start a sentry gives memory back: boot and
// restore are over by then.
const settle = time.Second

// gcPercent of a running sentry. It trades a little CPU for about 1.5 MiB of
// resident memory in every idle sandbox.
const gcPercent = 50

// Main runs one of the commands that gVisor re-executes itself for, chosen by
// os.Args, and does not return.
func Main() {
	if slices.Contains(os.Args, "boot") {
		bootFast()
		args, err := bootflags.Apply(os.Args)
		if err = errors.Join(err, closeInherited(os.Args), makeWire(), trimBounding(), useUmounter()); err != nil {
			// Loudly: a guest must not run under other limits or with more
			// privilege than it was meant to.
			fmt.Fprintln(os.Stderr, "bivy-sentry:", err)
			os.Exit(128)
		}
		os.Args = args
		spareProcessors(args)
		serveChanges()
	}
	UsePrecompiled()
	const internal = "internal use only"
	cli.Run(nil, map[util.SubCommand]string{
		new(sentrycmd.Boot):   internal,
		new(cmd.Gofer):        internal,
		new(sentrycmd.Umount): internal,
	}, nil)
}

// bootFast spends less on the way to the first instruction: no collection,
// and one scheduler thread, since boot drops capabilities on every thread in
// turn. The sentry sets GOMAXPROCS itself before it makes its platform.
func bootFast() {
	debug.SetGCPercent(-1)
	// Not unbounded: a boot that goes wrong must still be collected.
	limit := debug.SetMemoryLimit(256 << 20)
	runtime.GOMAXPROCS(1)
	// Ends by itself after one tick; the process is its owner.
	go func() {
		time.Sleep(settle)
		debug.SetMemoryLimit(limit)
		debug.SetGCPercent(gcPercent)
		debug.FreeOSMemory()
	}()
}

// spareProcessors keeps a restore from raising GOMAXPROCS by the number of its
// readers, 128: the runtime gives each processor 18 KiB that it never takes
// back, and stops the world twice to make and to retire them. A snapshot of a
// few megabytes gains nothing from so many.
//
// gVisor adds them to a count of temporary processors. That begins at minus
// the same number here, which no call can bring below zero again: sums that
// are not positive change nothing, and the first queue of readers brings it to
// zero. Until then nothing else sets GOMAXPROCS, so it is set here.
func spareProcessors(args []string) {
	n := runtime.NumCPU()
	for _, a := range args {
		if v, ok := strings.CutPrefix(a, "--cpu-num="); ok {
			if limit, err := strconv.Atoi(v); err == nil && limit > 0 {
				n = limit
			}
		}
	}
	temporaryProcessors = -readers
	runtime.GOMAXPROCS(n)
}

// readers of a page file, as gVisor's stateio package has it.
const readers = 128

//go:linkname temporaryProcessors gvisor.dev/gvisor/pkg/gomaxprocs.temp
var temporaryProcessors int

// precompiledPrograms is the table that gVisor fills from generated code in
// its own build and leaves empty in the Go module. There is no exported way
// to fill it; a missing or renamed symbol fails the link, and a missing
// program only costs time, never safety.
//
//go:linkname precompiledPrograms gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var precompiledPrograms map[string]precompiledseccomp.Program

// UsePrecompiled makes the filter package use the programs compiled by go
// generate.
func UsePrecompiled() {
	// Listing runs the package's once, which would otherwise overwrite the
	// table later.
	filter.ListPrecompiled()
	precompiledPrograms = precompiled()
}
