package guest

import (
	"fmt"
	"log/slog"
	"os"

	"golang.org/x/sys/unix"
)

// Settle makes this process a good parent: what children inherit is as they
// expect it, and what is ours stays ours. It is for the whole process and
// belongs before New.
func Settle(log *slog.Logger) error {
	unix.Umask(0o022)
	if err := os.Chdir("/"); err != nil {
		return err
	}
	// What the runtime left open is not for programs. An old kernel cannot do
	// this, and what is open there is the runtime's choice.
	if err := unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		log.Debug("inherited descriptors stay inheritable", "err", err)
	}
	// Memory, environment and descriptors in /proc belong to root alone.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("hide from other users: %w", err)
	}
	// Children inherit it: when memory ends, they go before what runs them. A
	// kernel without the file has no such order either.
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("100"), 0); err != nil {
		log.Debug("oom_score_adj is not set", "err", err)
	}
	return nil
}
