package api

import (
	"encoding/json"
	"strconv"
	"sync"
	"time"

	"bivy/client"
)

// updates answers with JSON lines: progress while something is being done, then
// its result. The status is sent with the first line, so a failure before any
// progress is an error answer like any other.
type updates struct {
	c      *call
	status int

	mu   sync.Mutex
	sent time.Time // of the last progress
	over bool
}

// progressInterval is the shortest time between two lines of progress.
const progressInterval = 50 * time.Millisecond

func newUpdates(c *call, status int) *updates { return &updates{c: c, status: status} }

// open sends the status now.
func (u *updates) open() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.openLocked()
	u.flushLocked()
}

func (u *updates) openLocked() {
	if u.c.w.status == 0 {
		u.c.w.Header().Set("Content-Type", client.NDJSONType)
		u.c.w.WriteHeader(u.status)
	}
}

// flushLocked sends what was written. An error shows in the next write.
func (u *updates) flushLocked() { _ = u.c.ctl.Flush() }

// send writes one line.
func (u *updates) send(v any) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.sendLocked(v)
}

func (u *updates) sendLocked(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	u.openLocked()
	_, err = u.c.w.Write(append(b, '\n'))
	u.flushLocked()
	return err
}

// progress writes a line of progress, unless the last one is newer than
// progressInterval. It may be called from any goroutine, also after the end.
func (u *updates) progress(v any) {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := time.Now()
	if u.over || now.Sub(u.sent) < progressInterval {
		return
	}
	u.sent = now
	// A caller that has gone is noticed by the work's own context.
	_ = u.sendLocked(v)
}

// last writes the result, or the error, as the last line.
func (u *updates) last(err error, result any, failed func(*client.Error) any) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.over = true
	if err == nil {
		return u.sendLocked(result)
	}
	if u.c.w.status == 0 || gone(u.c.ctx(), err) {
		return err
	}
	u.c.h.logInternal(u.c.w, u.c.req, err)
	e := wireError(err, u.c.w.request)
	return u.sendLocked(failed(&e))
}

func uintText(n uint64) string { return strconv.FormatUint(n, 10) }
