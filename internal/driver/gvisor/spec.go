package gvisor

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/flag"

	"bivy/internal/driver"
	"bivy/internal/driver/gvisor/bootflags"
	"bivy/internal/kind"
)

// hostID is the first of the host's user and group ids that guests are mapped
// to. Guest root has no rights on the host. All sandboxes share the range, since gVisor restores a snapshot only under the mapping it was saved
// with; each is in user, process and mount namespaces of its own.
const (
	hostID  = 0x70000000
	idCount = 65536
)

// config is runsc's configuration, the same for every sandbox.
func (d *Driver) config() (*config.Config, error) {
	flags := flag.NewFlagSet("bivy", flag.ContinueOnError)
	config.RegisterFlags(flags)
	set := map[string]string{
		"root":     d.stateDir(),
		"platform": "systrap",
		// No host network at all; the wire comes by descriptor.
		"network": "none",
		// Placed by us, after the fact: on cgroup v1 runsc would move this
		// whole process into the sandbox's group and back.
		"ignore-cgroups": "true",
		// Advice for people, checked at every start.
		"host-settings": "ignore",
		// sudo is part of what images promise.
		"allow-suid": "true",
		// The root is an immutable image under a layer in memory.
		"overlay2": "none",
		// Resets of connections are part of a snapshot's contract.
		"net-disconnect-ok": "true",
		"watchdog-action":   "log",
	}
	if d.opt.DebugDir != "" {
		set["debug"], set["debug-log"] = "true", d.opt.DebugDir+"/"
	}
	for k, v := range set {
		if err := flags.Set(k, v); err != nil {
			return nil, fmt.Errorf("gvisor flag %s: %w", k, err)
		}
	}
	return config.NewFromFlags(flags)
}

func validate(req driver.StartRequest) error {
	if _, _, err := req.ID.Split(); err != nil {
		return err
	}
	if !filepath.IsAbs(req.Image) {
		return kind.Errorf(kind.Invalid, "image path %q is not absolute", req.Image).WithField("image")
	}
	if _, err := os.Stat(req.Image); err != nil {
		return kind.Errorf(kind.NotFound, "image: %w", err).WithField("image")
	}
	if s := req.Shape; s.CPUs < 0 || s.MemoryBytes < 0 || (s.DiskBytes != 0 && s.DiskBytes != req.Limits.DiskBytes) {
		return kind.Errorf(kind.Invalid, "a shape of %+v with limits of %+v: the disk that the guest sees is the limit", s, req.Limits).WithField("shape")
	}
	if len(req.Args) == 0 || !strings.HasPrefix(req.Args[0], "/") {
		return kind.Errorf(kind.Invalid, "the first process needs an absolute path, not %q", req.Args).WithField("args")
	}
	return nil
}

// guestCapabilities are guest root's, inside the guest kernel only: what a
// container engine grants, and what debugging and mounting inside one's own
// sandbox need. No raw sockets: there is nothing to send them to.
var guestCapabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_ADMIN",
	"CAP_SYS_CHROOT", "CAP_SYS_PTRACE",
}

// spec is the OCI description of one sandbox. Restoring a snapshot compares
// nearly all of it with what was saved, so that what differs between sandboxes
// of one template is only what gVisor lets differ: the host name.
func spec(req driver.StartRequest, bundle string) *specs.Spec {
	ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: hostID, Size: idCount}}
	s := &specs.Spec{
		Version: specs.Version,
		Process: &specs.Process{
			Args:         req.Args,
			Env:          req.Env,
			Cwd:          "/",
			Capabilities: &specs.LinuxCapabilities{Bounding: guestCapabilities, Effective: guestCapabilities, Permitted: guestCapabilities, Inheritable: nil},
			Rlimits:      []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 65536, Soft: 65536}, {Type: "RLIMIT_CORE"}},
		},
		Root:     &specs.Root{Path: filepath.Join(bundle, "root")},
		Hostname: req.Hostname,
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
			// Not part of the writable layer: what is told to a guest at run time is
			// no change of its file system.
			{Destination: "/run", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=0755", "size=64m"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=1777", "size=256m"}},
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
				{Type: specs.MountNamespace}, {Type: specs.NetworkNamespace}, {Type: specs.UserNamespace},
			},
			UIDMappings: ids,
			GIDMappings: ids,
		},
		Annotations: map[string]string{
			"dev.gvisor.spec.rootfs.source":  req.Image,
			"dev.gvisor.spec.rootfs.type":    "erofs",
			"dev.gvisor.spec.rootfs.overlay": "memory",
		},
	}
	if req.Limits.DiskBytes > 0 {
		s.Annotations["dev.gvisor.spec.rootfs.options"] = "size=" + strconv.FormatInt(req.Limits.DiskBytes, 10)
	}
	return s
}

// writeBundle fills the bundle with what gVisor reads.
func writeBundle(dir string, s *specs.Spec, shape driver.Shape) error {
	if err := os.MkdirAll(filepath.Join(dir, "root"), 0o711); err != nil {
		return err
	}
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600); err != nil {
		return err
	}
	return bootflags.Write(dir, bootFlags(shape))
}

// bootFlags make the guest see the shape as its machine.
func bootFlags(s driver.Shape) []string {
	var flags []string
	if s.MemoryBytes > 0 {
		flags = append(flags, fmt.Sprintf("--total-memory=%d", s.MemoryBytes))
	}
	if s.CPUs > 0 {
		flags = append(flags, fmt.Sprintf("--cpu-num=%d", s.CPUs))
	}
	return flags
}
