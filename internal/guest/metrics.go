package guest

import (
	"bytes"
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/guest/proc"
	"bivy/internal/guest/wire"
)

// maxDisk is the largest disk size in bytes that is believed: a file system in
// memory may report 2^63.
const maxDisk = 1 << 50

// usage keeps the processor time at the previous call, because a rate needs two
// measurements.
type usage struct {
	mu   sync.Mutex
	at   time.Time
	used time.Duration
}

// metrics measures the guest from inside. Values that the kernel does not report
// are zero; the host's own measurements of the sandbox are more exact.
func (a *Agent) metrics() wire.Metrics {
	m := wire.Metrics{Timestamp: a.now().Unix(), CPUCount: runtime.NumCPU()}
	m.CPUUsedPct = a.usage.percent(cpuTime(), time.Now())
	memory := meminfo()
	m.MemTotal = memory["MemTotal"]
	m.MemCache = memory["Cached"]
	if free := memory["MemAvailable"]; free <= m.MemTotal {
		m.MemUsed = m.MemTotal - free
	}
	m.MemTotalMB, m.MemUsedMB = m.MemTotal>>20, m.MemUsed>>20
	var st unix.Statfs_t
	if unix.Statfs("/", &st) == nil && st.Bsize > 0 {
		size := uint64(st.Bsize) //nolint:gosec // positive
		if st.Blocks <= maxDisk/size {
			m.DiskTotal = st.Blocks * size
			m.DiskUsed = (st.Blocks - min(st.Bfree, st.Blocks)) * size
		}
	}
	return m
}

// percent returns the share of one processor used since the last call, times
// a hundred.
func (u *usage) percent(used time.Duration, now time.Time) float64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	since, passed := used-u.used, now.Sub(u.at)
	first := u.at.IsZero()
	u.used, u.at = used, now
	if first || since < 0 || passed <= 0 {
		return 0
	}
	return float64(since) / float64(passed) * 100
}

// cpuTime returns the processor time used in the guest so far: from /proc/stat,
// or where the kernel leaves that at zero, the sum over living processes and
// reaped children.
func cpuTime() time.Duration {
	const tick = 10 * time.Millisecond // USER_HZ is 100 on every supported architecture
	text, err := os.ReadFile("/proc/stat")
	if line, _, ok := bytes.Cut(text, []byte("\n")); err == nil && ok {
		var busy uint64
		for i, f := range bytes.Fields(line) {
			n, err := strconv.ParseUint(string(f), 10, 64)
			// user, nice, system; idle and iowait are not work
			if err == nil && i >= 1 && i <= 3 {
				busy += n
			}
		}
		if busy > 0 {
			return time.Duration(busy) * tick //nolint:gosec // centuries
		}
	}
	sum := time.Duration(proc.Ticks()) * tick //nolint:gosec // centuries
	var r unix.Rusage
	if unix.Getrusage(unix.RUSAGE_CHILDREN, &r) == nil {
		sum += time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	return sum
}

// meminfo returns the lines of /proc/meminfo in bytes.
func meminfo() map[string]uint64 {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return nil
	}
	all := map[string]uint64{}
	for line := range bytes.Lines(text) {
		f := bytes.Fields(line)
		if len(f) < 2 {
			continue
		}
		if n, err := strconv.ParseUint(string(f[1]), 10, 64); err == nil && n < 1<<53 {
			all[string(bytes.TrimSuffix(f[0], []byte(":")))] = n << 10
		}
	}
	return all
}
