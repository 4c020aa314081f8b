package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"bivy/internal/driver"
	"bivy/internal/session"
)

// newSlot returns a fresh name for what a sandbox has on the host.
//
// It has the form of a sandbox id of generation 0. A slot whose label is
// missing is therefore listed and destroyed like a sandbox, under its own
// name.
func newSlot() string { return string(session.NewID().Sandbox(0)) }

func isSlot(name string) bool {
	_, generation, err := session.SandboxID(name).Split()
	return err == nil && generation == 0
}

// label is the file in a bundle that says whose the slot is.
type label struct {
	Version int               `json:"version"`
	Sandbox session.SandboxID `json:"sandbox"`
	Owner   driver.Owner      `json:"owner"`
}

const (
	labelVersion = 1
	labelFile    = "sandbox"
	// temporary begins the names of bundles that are being made or removed,
	// in which there is nothing but files.
	temporary = "."
)

// makeBundle makes the bundle of a slot with its label. It appears under its
// name with the label in it, so that a process that dies never leaves a slot
// without one.
//
// It does not wait for the disk, which would take longer than the rest of a
// start. A loss of power ends every sandbox, and leaves files at most: a
// bundle whose label was lost by it is listed under the slot's name.
func (d *Driver) makeBundle(slot string, l label) error {
	l.Version = labelVersion
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	work := d.bundle(temporary + slot)
	if err := os.Mkdir(work, 0o711); err != nil {
		return err
	}
	err = os.WriteFile(filepath.Join(work, labelFile), b, 0o600)
	if err == nil {
		err = os.Rename(work, d.bundle(slot))
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(work))
	}
	return nil
}

// removeBundle removes the bundle of a slot. Its name goes first, so that a
// crash leaves no bundle without a label.
func (d *Driver) removeBundle(slot string) error {
	work := d.bundle(temporary + slot)
	if err := os.Rename(d.bundle(slot), work); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.RemoveAll(work)
}

// removeTemporary removes what a process that died left half made or half
// removed.
func (d *Driver) removeTemporary() error {
	entries, err := os.ReadDir(d.bundles())
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), temporary) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(d.bundles(), e.Name())))
		}
	}
	return err
}

// readLabel reads whose a slot is; it fails with fs.ErrNotExist when there is
// no such bundle.
func (d *Driver) readLabel(slot string) (label, error) {
	b, err := os.ReadFile(filepath.Join(d.bundle(slot), labelFile))
	if err != nil {
		return label{}, err
	}
	var l label
	if err := json.Unmarshal(b, &l); err != nil {
		return label{}, fmt.Errorf("label of slot %s: %w", slot, err)
	}
	if _, _, err := l.Sandbox.Split(); err != nil || l.Version != labelVersion {
		return label{}, fmt.Errorf("label of slot %s: version %d, sandbox %.64q", slot, l.Version, string(l.Sandbox))
	}
	return l, nil
}

// labelsLocked returns whose the slots with a bundle are. A slot whose label
// does not read has the zero label. Called with d.mu held.
func (d *Driver) labelsLocked() (map[string]label, error) {
	entries, err := os.ReadDir(d.bundles())
	if err != nil {
		return nil, err
	}
	known := make(map[string]label, len(d.sandboxes))
	for _, s := range d.sandboxes {
		known[s.slot] = label{Version: labelVersion, Sandbox: s.id, Owner: s.req.Owner}
	}
	labels := make(map[string]label, len(entries))
	for _, e := range entries {
		slot := e.Name()
		if !isSlot(slot) {
			continue
		}
		l, ok := known[slot]
		if !ok {
			l, err = d.readLabel(slot)
			if errors.Is(err, fs.ErrNotExist) {
				if _, statErr := os.Lstat(d.bundle(slot)); errors.Is(statErr, fs.ErrNotExist) {
					continue // removed meanwhile
				}
			}
			if err != nil {
				d.log.Error("a bundle does not say whose it is", "slot", slot, "error", err)
			}
		}
		labels[slot] = l
	}
	return labels, nil
}

// slotsOfLocked finds the slots of a sandbox on the host. Called with d.mu
// held.
func (d *Driver) slotsOfLocked(id session.SandboxID) ([]string, error) {
	labels, err := d.labelsLocked()
	if err != nil {
		return nil, err
	}
	var slots []string
	for slot, l := range labels {
		if l.Sandbox == id {
			slots = append(slots, slot)
		}
	}
	// The name of a slot without a label, or of what is left without a bundle.
	if isSlot(string(id)) && labels[string(id)].Sandbox == "" {
		slots = append(slots, string(id))
	}
	return slots, nil
}

// unplaced finds the sentry processes of a slot by the marks on them: our
// binary, our root, the slot as last argument. A start that was cut short may
// have left one outside every group and without a state file.
func (d *Driver) unplaced(slot string) ([]*process, error) {
	sentries, err := d.scan()
	if err != nil {
		return nil, err
	}
	var found []*process
	for pid, of := range sentries {
		if of != slot {
			continue
		}
		p, err := open(pid)
		if err != nil {
			continue // ended by itself meanwhile
		}
		// Looked at again through what is now held: the pid may have passed
		// to another process in between.
		if again, ok := d.slotOf(pid); !ok || again != slot {
			p.pidfd.Close()
			continue
		}
		found = append(found, p)
	}
	return found, nil
}

// findChild finds the sentry of a slot among this process's children, once it
// executes.
func (d *Driver) findChild(slot string) (pid int, ok bool) {
	children, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		return 0, false
	}
	for _, file := range children {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // of a thread that ended meanwhile
		}
		for _, f := range strings.Fields(string(b)) {
			pid, err := strconv.Atoi(f)
			if err != nil {
				continue
			}
			if of, ok := d.slotOf(pid); ok && of == slot {
				return pid, true
			}
		}
	}
	return 0, false
}

// scan lists the sentries of this root: pid to slot.
func (d *Driver) scan() (map[int]string, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	found := map[int]string{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if slot, ok := d.slotOf(pid); ok {
			found[pid] = slot
		}
	}
	return found, nil
}

// isSentry reports whether a process runs as a user that only sentries have.
// Any user of the host can give a process the other marks, but not this one.
func isSentry(pid int) bool {
	status, err := statusOf(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	real, _, _ := strings.Cut(status["Uid"], "\t")
	uid, err := strconv.ParseInt(real, 10, 64)
	return err == nil && uid >= hostID && uid < hostID+idCount
}

// slotOf reads the slot of a sentry of this root from its command line. Guests
// cannot fake it: their processes have no command line on the host but the
// stub's.
func (d *Driver) slotOf(pid int) (string, bool) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
	if err != nil || len(b) == 0 {
		return "", false
	}
	args := strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00")
	if args[0] != "runsc-sandbox" || !isSentry(pid) {
		return "", false
	}
	slot := args[len(args)-1]
	for _, a := range args {
		if a == "--root="+d.stateDir() {
			return slot, isSlot(slot)
		}
	}
	return "", false
}

// List implements driver.Driver: the union of processes, groups and bundles.
func (d *Driver) List(ctx context.Context) ([]driver.Found, error) {
	sentries, err := d.scan()
	if err != nil {
		return nil, err
	}
	groups, err := d.host.List()
	if err != nil {
		return nil, err
	}
	// After the processes and groups: what was made meanwhile has a label.
	d.mu.Lock()
	labels, err := d.labelsLocked()
	d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	slots := map[string]bool{} // whether it runs
	for slot := range labels {
		slots[slot] = false
	}
	for _, name := range groups {
		if isSlot(name) {
			slots[name] = false
		}
	}
	for _, slot := range sentries {
		slots[slot] = true
	}
	all := map[session.SandboxID]driver.Found{}
	for slot, running := range slots {
		f := driver.Found{ID: labels[slot].Sandbox, Owner: labels[slot].Owner}
		if f.ID == "" {
			f.ID = session.SandboxID(slot)
		}
		f.Running = running || all[f.ID].Running
		all[f.ID] = f
	}
	found := make([]driver.Found, 0, len(all))
	for _, f := range all {
		found = append(found, f)
	}
	return found, ctx.Err()
}
