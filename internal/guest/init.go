package guest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/argv"
	"bivy/internal/guest/accounts"
	"bivy/internal/guest/files"
	"bivy/internal/guest/wire"
)

// clockSlack is the largest difference between the clocks that is ignored: it
// is about the time that the request takes to arrive.
const clockSlack = 20 * time.Millisecond

// hostsComment ends the line in /etc/hosts that the agent wrote and may replace.
const hostsComment = "# bivy"

// serveInit answers POST /init, which only the host may send. The first one
// needs no token, because none is set yet; each later one, as after a restore,
// needs the current token.
func (a *Agent) serveInit(w http.ResponseWriter, r *http.Request) error {
	if err := method(r, http.MethodPost); err != nil {
		return err
	}
	a.initLock.Lock()
	defer a.initLock.Unlock()
	if token, _ := a.accessToken(); token != "" && !equalSecrets(r.Header.Get(wire.HeaderToken), token) {
		return httpError(http.StatusUnauthorized, "the sandbox is initialised: send the current access token as "+wire.HeaderToken)
	}
	var req wire.InitRequest
	dec := json.NewDecoder(io.LimitReader(r.Body, maxInit))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&req); err != nil {
		return httpError(http.StatusBadRequest, "the body is not an initialisation: "+err.Error())
	}
	if err := a.check(req); err != nil {
		return err
	}
	if err := a.apply(req); err != nil {
		return err
	}
	offset, set := a.setClock(req.Timestamp)
	a.mu.Lock()
	a.ready = true
	a.token = req.AccessToken
	a.generation++
	generation := a.generation
	a.mu.Unlock()
	a.log.Info("initialised", "generation", generation, "lifecycle", req.LifecycleID, "clock_offset", offset, "clock_set", set)

	h := w.Header()
	h.Set(wire.HeaderVersion, wire.Version)
	h.Set(wire.HeaderGeneration, strconv.FormatUint(generation, 10))
	h.Set(wire.HeaderClockOffset, strconv.FormatInt(offset.Milliseconds(), 10))
	h.Set(wire.HeaderClockSet, strconv.FormatBool(set))
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func badField(field, format string, args ...any) error {
	return &files.HTTPError{Status: http.StatusBadRequest, Text: field + ": " + fmt.Sprintf(format, args...)}
}

// check validates all of req, so that apply does not stop half way.
func (a *Agent) check(req wire.InitRequest) error {
	// The limits of a process apply: the template's variables and the session's
	// are merged here.
	if err := argv.CheckProcessEnv("envVars", req.EnvVars); err != nil {
		return &files.HTTPError{Status: http.StatusBadRequest, Why: wire.ReasonOf(err), Text: err.Error()}
	}
	if len(req.AccessToken) > 1024 || strings.ContainsFunc(req.AccessToken, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return badField("accessToken", "want up to 1024 printable characters without spaces")
	}
	if !validHostname(req.Hostname) {
		return badField("hostname", "%.80q: want up to 64 letters, digits, dots and hyphens", req.Hostname)
	}
	var u accounts.User
	if req.DefaultUser != "" || req.DefaultWorkdir != "" {
		var err error
		if u, err = a.resolver.User(req.DefaultUser); err != nil {
			why := wire.Reason("")
			if unknown := (*accounts.UnknownError)(nil); errors.As(err, &unknown) {
				why = wire.ReasonUser
			}
			return &files.HTTPError{Status: http.StatusBadRequest, Why: why, Text: "defaultUser: " + err.Error()}
		}
	}
	if _, err := a.resolver.Path(u, req.DefaultWorkdir); err != nil {
		return badField("defaultWorkdir", "%v", err)
	}
	return nil
}

func validHostname(name string) bool {
	if len(name) > 64 || strings.HasPrefix(name, "-") || strings.HasPrefix(name, ".") {
		return false
	}
	for _, c := range []byte(name) {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '.') {
			return false
		}
	}
	return true
}

func (a *Agent) apply(req wire.InitRequest) error {
	if req.Hostname != "" && a.cfg.SetName {
		if err := unix.Sethostname([]byte(req.Hostname)); err != nil {
			return fmt.Errorf("set host name: %w", err)
		}
		if err := a.nameInHosts(req.Hostname); err != nil {
			// The image may be read-only. Without the entry sudo only prints a warning.
			a.log.Warn("cannot add the host name to the hosts file", "err", err)
		}
	}
	a.resolver.Update(accounts.Settings{User: req.DefaultUser, Workdir: req.DefaultWorkdir, Env: req.EnvVars})
	if err := a.writeE2BFiles(req.EnvVars); err != nil {
		a.log.Warn("cannot write the files for E2B's tools", "err", err)
	}
	return nil
}

// nameInHosts adds an entry for name to the hosts file, so that it resolves to
// this machine. It does not write a file that has one already, because the
// session's record lists every changed file.
func (a *Agent) nameInHosts(name string) error {
	path := filepath.Join(a.cfg.Etc, "hosts")
	old, err := readSmall(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	var b bytes.Buffer
	there := false
	for line := range bytes.Lines(old) {
		if bytes.HasSuffix(bytes.TrimSpace(line), []byte(hostsComment)) {
			continue
		}
		b.Write(line)
		entry, _, _ := strings.Cut(string(line), "#")
		if fields := strings.Fields(entry); len(fields) > 1 {
			there = there || slices.Contains(fields[1:], name)
		}
	}
	if there && b.Len() == len(old) {
		return nil
	}
	if b.Len() > 0 && b.Bytes()[b.Len()-1] != '\n' {
		b.WriteByte('\n')
	}
	if !there {
		fmt.Fprintf(&b, "127.0.1.1\t%s %s\n", name, hostsComment)
	}
	return os.WriteFile(path, b.Bytes(), 0o644) //nolint:gosec // readable by every user
}

// maxHosts is the size in bytes up to which a hosts file is rewritten.
const maxHosts = 1 << 20

// readSmall reads a regular file of at most maxHosts bytes. Programs in the
// sandbox may have replaced it by a FIFO, which would block, or by a huge file.
func readSmall(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxHosts {
		return nil, fmt.Errorf("%s is not changed: %s of %d bytes", path, info.Mode(), info.Size())
	}
	return io.ReadAll(io.LimitReader(f, maxHosts))
}

// writeE2BFiles writes the files from which E2B's tools read the ids of the
// sandbox and the template.
func (a *Agent) writeE2BFiles(env map[string]string) error {
	dir := filepath.Join(a.cfg.Run, "e2b")
	for _, name := range [...]string{"E2B_SANDBOX", "E2B_SANDBOX_ID", "E2B_TEMPLATE_ID"} {
		value, ok := env[name]
		if !ok {
			continue
		}
		if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // readable by every user
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, "."+name), []byte(value), 0o644); err != nil { //nolint:gosec // readable by every user
			return err
		}
	}
	return nil
}

// setClock sets the guest's clock to the host's time. Where the kernel does not
// permit that, the agent stores the difference, and uses it to check expiry
// times. It returns the difference before the call and whether the clock was set.
func (a *Agent) setClock(host time.Time) (offset time.Duration, set bool) {
	if host.IsZero() {
		return 0, false
	}
	offset = time.Until(host)
	if offset.Abs() <= clockSlack {
		offset = 0
	} else if a.cfg.SetClock {
		tv := unix.NsecToTimeval(host.UnixNano())
		set = unix.Settimeofday(&tv) == nil // gVisor never allows it
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.offset = offset; set {
		a.offset = 0
	}
	return offset, set
}
