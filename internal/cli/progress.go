package cli

import (
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"bivy/client"
)

// barDelay is how long an operation takes before it gets a progress bar.
const barDelay = time.Second

// meter is the progress bar of one operation. It writes to stderr, and only when
// that is a terminal.
type meter struct {
	a     *app
	begun time.Time
	show  bool // stderr is a terminal

	mu    sync.Mutex
	bar   *progressbar.ProgressBar
	what  string
	total int64
	done  int64
}

func (a *app) newMeter() *meter {
	return &meter{a: a, begun: time.Now(), show: term.IsTerminal(int(a.Err.Fd()))}
}

// set moves the bar. Another what starts a new bar.
func (m *meter) set(what string, done, total int64) {
	if !m.show || time.Since(m.begun) < barDelay {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bar == nil || m.what != what || m.total != total {
		m.endLocked()
		limit := total
		if limit <= 0 {
			limit = -1 // a spinner
		}
		m.bar = progressbar.NewOptions64(limit, progressbar.OptionSetWriter(m.a.Err), progressbar.OptionSetDescription(oneLine(what)),
			progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish(), progressbar.OptionShowBytes(false))
		m.what, m.total = what, total
	}
	m.draw(m.bar.Set64(done))
}

// draw ignores the error of drawing: output is not affected by it.
func (m *meter) draw(error) {}

func (m *meter) progress(p client.Progress) { m.set(p.What, p.Done, p.Total) }

// add counts n more bytes.
func (m *meter) add(what string, n, total int64) {
	m.mu.Lock()
	m.done += n
	done := m.done
	m.mu.Unlock()
	m.set(what, done, total)
}

// end removes the bar.
func (m *meter) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.endLocked()
}

func (m *meter) endLocked() {
	if m.bar != nil {
		m.draw(m.bar.Clear())
		m.draw(m.bar.Exit())
		m.bar = nil
	}
}
