package proc

import (
	"bytes"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// stat is what /proc/PID/stat says about one process.
type stat struct {
	pid, ppid, pgrp, session int
	state                    byte
	ticks                    uint64 // user plus system time
	mark                     uint64
}

// maxRounds limits how often killTree searches for members. Each round stops or
// kills all members that it finds; only processes that fork very fast need more
// than three.
const maxRounds = 200

// killTree kills a process and all its descendants, also those that have left its
// session and lost their parent. It stops all members first, so that none can
// fork while the others are killed. It returns how many it killed.
func killTree(leader int, mark uint64) int {
	killed := map[int]bool{}
	stopped := map[int]bool{}
	for range maxRounds {
		fresh, alive := false, false
		for _, p := range members(processes(), leader, mark) {
			if p.state == 'Z' || p.state == 'X' {
				continue
			}
			alive = true
			if !stopped[p.pid] {
				stopped[p.pid], fresh = true, true
				// An error means that the process has ended.
				_ = unix.Kill(p.pid, unix.SIGSTOP)
			}
		}
		if !alive {
			break
		}
		if fresh {
			continue
		}
		for pid := range stopped {
			killed[pid] = true
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		clear(stopped)
	}
	return len(killed)
}

// members selects the tree of leader from all processes: those that have the
// mark, are in the leader's session or process group, or have a member as parent.
func members(all []stat, leader int, mark uint64) []stat {
	in := make(map[int]bool, len(all))
	self := os.Getpid()
	for grown := true; grown; {
		grown = false
		for _, p := range all {
			if p.pid == self || in[p.pid] {
				continue
			}
			if p.pid == leader || p.session == leader || p.pgrp == leader || (mark != 0 && p.mark == mark) || in[p.ppid] {
				in[p.pid], grown = true, true
			}
		}
	}
	var tree []stat
	for _, p := range all {
		if in[p.pid] {
			tree = append(tree, p)
		}
	}
	return tree
}

// processes lists all processes in /proc. Those that end meanwhile are omitted.
func processes() []stat {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	names, _ := dir.Readdirnames(-1) // on an error, continue with the names that were read
	_ = dir.Close()
	all := make([]stat, 0, len(names))
	for _, name := range names {
		if name[0] < '1' || name[0] > '9' {
			continue
		}
		text, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue
		}
		if p, ok := parseStat(text); ok {
			all = append(all, p)
		}
	}
	return all
}

// parseStat parses proc_pid_stat(5). The command name may hold anything,
// parentheses and newlines included.
func parseStat(text []byte) (stat, bool) {
	open, end := bytes.IndexByte(text, '('), bytes.LastIndexByte(text, ')')
	if open < 1 || end < open {
		return stat{}, false
	}
	pid, err := strconv.Atoi(string(bytes.TrimSpace(text[:open])))
	f := bytes.Fields(text[end+1:])
	if err != nil || len(f) < 23 || len(f[0]) != 1 {
		return stat{}, false
	}
	ok := true
	number := func(i int) uint64 { // i is the field's number in proc_pid_stat(5)
		n, err := strconv.ParseUint(string(f[i-3]), 10, 64)
		ok = ok && err == nil
		return n
	}
	p := stat{
		pid: pid, state: f[0][0],
		ppid: int(number(4)), pgrp: signed(f[2]), session: signed(f[3]), //nolint:gosec // process ids are small
		ticks: number(14) + number(15),
		mark:  number(25),
	}
	return p, ok
}

// signed parses a number that is -1 in kernel threads.
func signed(text []byte) int {
	n, err := strconv.Atoi(string(text))
	if err != nil {
		return -1
	}
	return n
}

// Ticks returns the processor time of all living processes, in units of
// USER_HZ.
func Ticks() uint64 {
	var sum uint64
	for _, p := range processes() {
		sum += p.ticks
	}
	return sum
}
