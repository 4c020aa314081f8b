package bench

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"bivy/client"
)

// Host is the machine and the programs that figures are of.
type Host struct {
	Kernel     string            `json:"kernel"`
	Command    string            `json:"kernel_command_line"`
	CPU        string            `json:"cpu"`
	CPUs       int               `json:"cpus"`
	MemoryMiB  int64             `json:"memory_mib"`
	Virtual    bool              `json:"virtual"`
	KVM        bool              `json:"kvm"`
	Cgroup     string            `json:"cgroup"` // how groups are mounted
	THP        string            `json:"transparent_huge_pages"`
	Mitigation map[string]string `json:"mitigations"`
	Filesystem string            `json:"filesystem"` // below every engine's state
	Versions   map[string]string `json:"versions"`
	// The load average around the suite, and the part of all processor time
	// meanwhile that went to neither the measured nor the measurer.
	LoadBefore float64 `json:"load_before"`
	LoadAfter  float64 `json:"load_after"`
	Elsewhere  float64 `json:"busy_elsewhere"`
}

func describe(dir string, v client.Version) Host {
	h := Host{
		CPUs: runtime.NumCPU(), Command: fact("/proc/cmdline"), THP: fact("/sys/kernel/mm/transparent_hugepage/enabled"),
		Mitigation: map[string]string{}, Versions: map[string]string{"bivy": strings.TrimSpace(v.Version + " " + v.Commit), "go": runtime.Version()},
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		h.Kernel = string(bytes.TrimRight(u.Release[:], "\x00"))
	}
	for line := range strings.Lines(fact("/proc/cpuinfo")) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch strings.TrimSpace(key) {
		case "model name":
			h.CPU = strings.TrimSpace(value)
		case "flags":
			h.Virtual = strings.Contains(value+" ", " hypervisor ")
		}
	}
	h.MemoryMiB = meminfo("MemTotal") >> 20
	_, err := os.Stat("/dev/kvm")
	h.KVM = err == nil
	entries, _ := os.ReadDir("/sys/devices/system/cpu/vulnerabilities") // a kernel without it has nothing to tell
	for _, e := range entries {
		if text := fact("/sys/devices/system/cpu/vulnerabilities/" + e.Name()); text != "Not affected" {
			h.Mitigation[e.Name()] = text
		}
	}
	var fs unix.Statfs_t
	if unix.Statfs(dir, &fs) == nil {
		h.Filesystem = fmt.Sprintf("%s on %s", map[int64]string{unix.EXT4_SUPER_MAGIC: "ext4", unix.TMPFS_MAGIC: "tmpfs",
			unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs", unix.OVERLAYFS_SUPER_MAGIC: "overlayfs"}[fs.Type], dir)
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == "gvisor.dev/gvisor" {
				h.Versions["gvisor"] = m.Version
			}
		}
	}
	return h
}

// fact reads a small file of the kernel; what cannot be read is not known.
func fact(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// meminfo reads a line of /proc/meminfo, in bytes.
func meminfo(key string) int64 { return kib("/proc/meminfo", key) }

// kib reads "key: N kB" from a file, in bytes; 0 when it is not there.
func kib(path, key string) int64 {
	for line := range strings.Lines(fact(path)) {
		f := strings.Fields(line)
		if len(f) > 1 && f[0] == key+":" {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			return n << 10
		}
	}
	return 0
}

func loadAverage() float64 {
	first, _, _ := strings.Cut(fact("/proc/loadavg"), " ")
	v, _ := strconv.ParseFloat(first, 64)
	return v
}

// tick is the kernel's unit of processor time in /proc, fixed for user space.
const tick = 10 * time.Millisecond

// busy is all processor time of this machine since it started that was spent
// on something, that which its host took away included.
func busy() time.Duration {
	line, _, _ := strings.Cut(fact("/proc/stat"), "\n")
	var sum int64
	for i, f := range strings.Fields(line) {
		const idle, iowait, guest = 4, 5, 9 // guest time is in user time already
		if i == 0 || i == idle || i == iowait || i >= guest {
			continue
		}
		n, _ := strconv.ParseInt(f, 10, 64)
		sum += n
	}
	return time.Duration(sum) * tick
}

// startOthers begins to measure how busy the machine is with other things.
func startOthers(b *bench) (stop func() float64) {
	start, all, ours := time.Now(), busy(), b.groups.cpu()+self()
	return func() float64 {
		total := time.Since(start).Seconds() * float64(runtime.NumCPU())
		others := (busy() - all - (b.groups.cpu() + self() - ours)).Seconds()
		return round(max(0, others/total))
	}
}
