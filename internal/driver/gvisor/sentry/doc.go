// Package sentry is what the bivy-sentry binary runs: gVisor's boot, gofer
// and umount commands and nothing else of runsc.
//
// It is a binary of its own because every sandbox executes it: Go runs the
// package initialisers of all that is linked at each start, so SQL, HTTP and
// the CLI stay out (gVisor's own maincli is 83 MB, this is 34).
//
// Before gVisor's boot command runs, the process is prepared:
//
//	bootFast          no garbage collection, one scheduler thread
//	bootflags.Apply   flags from the bundle
//	closeInherited    descriptors that are not this sandbox's
//	makeWire          both ends of the wire
//	trimBounding      capabilities that gVisor would drop one by one
//	useUmounter       a small program in place of a second sentry
//	spareProcessors   fewer scheduler threads for a restore
//	UsePrecompiled    seccomp programs that go generate has compiled
package sentry
