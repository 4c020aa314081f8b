package sentry

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	_ "gvisor.dev/gvisor/pkg/sentry/platform/systrap"
	"gvisor.dev/gvisor/runsc/boot/filter"
	"gvisor.dev/gvisor/runsc/boot/filter/config"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"

	"bivy/internal/driver/gvisor/bootflags"
)

// TestPrecompiledForOurConfiguration fails when gVisor's keys have moved on
// and every start would compile its own filter again: run go generate.
func TestPrecompiledForOurConfiguration(t *testing.T) {
	UsePrecompiled()
	systrap, err := platform.Lookup("systrap")
	if err != nil {
		t.Fatal(err)
	}
	for _, info := range systrap.PrecompiledSeccompInfo() {
		opt := config.Options{Platform: info, HostFilesystem: true}
		program, ok := filter.GetPrecompiled(opt.ConfigKey())
		if !ok {
			t.Errorf("no program for %q; there are %q", opt.ConfigKey(), filter.ListPrecompiled())
			continue
		}
		if _, err := program.RenderInstructions(opt.Vars()); err != nil {
			t.Errorf("program for %q does not render: %v", opt.ConfigKey(), err)
		}
	}
}

// TestCapabilitiesAreGVisors holds our early trim to what gVisor keeps.
func TestCapabilitiesAreGVisors(t *testing.T) {
	byName := map[string]int{"CAP_CHOWN": unix.CAP_CHOWN, "CAP_DAC_OVERRIDE": unix.CAP_DAC_OVERRIDE,
		"CAP_DAC_READ_SEARCH": unix.CAP_DAC_READ_SEARCH, "CAP_FOWNER": unix.CAP_FOWNER, "CAP_FSETID": unix.CAP_FSETID}
	systrap, err := platform.Lookup("systrap")
	if err != nil {
		t.Fatal(err)
	}
	var want uint64
	if systrap.Requirements().RequiresCapSysPtrace {
		want |= 1 << unix.CAP_SYS_PTRACE
	}
	for _, name := range sentrycmd.DirectfsSandboxLinuxCaps.Bounding {
		bit, ok := byName[name]
		if !ok {
			t.Errorf("gVisor keeps %s, bootflags.Capabilities does not know it", name)
		}
		want |= 1 << bit
	}
	if bootflags.Capabilities != want {
		t.Errorf("Capabilities = %#x, gVisor keeps %#x", bootflags.Capabilities, want)
	}
}

// TestUmounter runs the program in namespaces of its own: it must wait for
// its byte, unmount /proc, and say so.
func TestUmounter(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skip: mount namespaces need root")
	}
	program := filepath.Join(t.TempDir(), "umount")
	if err := os.WriteFile(program, umounter(), 0o755); err != nil {
		t.Fatal(err)
	}
	run := func(feed string) (status, proc string) {
		t.Helper()
		script := fmt.Sprintf(`mount --make-rprivate / && mount -t proc proc /proc || exit 9
printf '%s' | %s umount --sync-fd=3 /proc 3<&0; echo "$? $(grep -c ' /proc proc ' /proc/self/mounts)"`, feed, program)
		cmd := exec.Command("sh", "-c", script)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID}
		out, err := cmd.CombinedOutput()
		status, proc, ok := strings.Cut(strings.TrimSpace(string(out)), " ")
		if err != nil || !ok {
			t.Fatalf("script: %v: %s", err, out)
		}
		return status, proc
	}
	if status, proc := run(""); status != "1" || proc != "2" {
		t.Errorf("without its byte: status %s with %s mounts of /proc, want 1 with 2", status, proc)
	}
	if status, proc := run("x"); status != "0" || proc != "1" {
		t.Errorf("with its byte: status %s with %s mounts of /proc, want 0 with 1", status, proc)
	}
}
