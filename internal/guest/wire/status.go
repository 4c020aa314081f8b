package wire

import (
	"strconv"
	"strings"
)

// signalNames are the names of signals in the status of an EndEvent.
var signalNames = [...]string{
	1: "hangup", 2: "interrupt", 3: "quit", 4: "illegal instruction", 5: "trace/breakpoint trap",
	6: "aborted", 7: "bus error", 8: "floating point exception", 9: "killed", 10: "user defined signal 1",
	11: "segmentation fault", 12: "user defined signal 2", 13: "broken pipe", 14: "alarm clock",
	15: "terminated", 16: "stack fault", 17: "child exited", 18: "continued", 19: "stopped (signal)",
	20: "stopped", 21: "stopped (tty input)", 22: "stopped (tty output)", 23: "urgent I/O condition",
	24: "CPU time limit exceeded", 25: "file size limit exceeded", 26: "virtual timer expired",
	27: "profiling timer expired", 28: "window changed", 29: "I/O possible", 30: "power failure", 31: "bad system call",
}

// ExitStatus is the status text of a process that exited by itself.
func ExitStatus(code int) string { return "exit status " + strconv.Itoa(code) }

// SignalStatus is the status text of a process that a signal ended.
func SignalStatus(signal int, core bool) string {
	s := "signal: "
	if signal > 0 && signal < len(signalNames) {
		s += signalNames[signal]
	} else {
		s += "signal " + strconv.Itoa(signal)
	}
	if core {
		s += " (core dumped)"
	}
	return s
}

// StatusSignal returns the number of the signal that a status text names, or 0.
func StatusSignal(status string) int {
	name, ok := strings.CutPrefix(status, "signal: ")
	if !ok {
		return 0
	}
	name = strings.TrimSuffix(name, " (core dumped)")
	for i, s := range signalNames {
		if s != "" && s == name {
			return i
		}
	}
	number, ok := strings.CutPrefix(name, "signal ")
	if !ok {
		return 0
	}
	n, err := strconv.Atoi(number)
	if err != nil || n < 1 || n > 64 {
		return 0
	}
	return n
}
