package guest

import (
	"fmt"
	"log/slog"
	"os"

	"golang.org/x/sys/unix"
)

// PrepareProcess sets what child processes inherit: umask 022, the working
// directory "/", no open descriptors, and an OOM score of 100. It also hides the
// agent's memory and environment from other users. It changes the whole process
// and must be called before New.
func PrepareProcess(log *slog.Logger) error {
	unix.Umask(0o022)
	if err := os.Chdir("/"); err != nil {
		return err
	}
	// Programs must not inherit descriptors that the container runtime left
	// open. Kernels before 5.11 do not support this; there they are inherited.
	if err := unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		log.Debug("close-on-exec is not set on inherited descriptors", "err", err)
	}
	// Makes the agent's files in /proc (memory, environment, descriptors)
	// readable by root only.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("hide from other users: %w", err)
	}
	// Children inherit the score: when memory runs out, the kernel kills them
	// before the agent. Kernels without the file have no OOM killer to steer.
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("100"), 0); err != nil {
		log.Debug("oom_score_adj is not set", "err", err)
	}
	return nil
}
