package cli

import (
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"bivy/client"
)

// barDelay is how long work may take before it gets a bar.
const barDelay = time.Second

// meter shows how far long work is, on stderr and only on a terminal.
type meter struct {
	a     *app
	begun time.Time
	show  bool

	mu    sync.Mutex
	bar   *progressbar.ProgressBar
	what  string
	total int64
	done  int64
}

func (a *app) newMeter() *meter {
	return &meter{a: a, begun: time.Now(), show: term.IsTerminal(int(a.Err.Fd()))}
}

// set moves the bar; a new what begins a new one.
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

// draw takes the outcome of drawing, which is worth nobody's attention.
func (m *meter) draw(error) {}

func (m *meter) progress(p client.Progress) { m.set(p.What, p.Done, p.Total) }

// add counts n more bytes of work.
func (m *meter) add(what string, n, total int64) {
	m.mu.Lock()
	m.done += n
	done := m.done
	m.mu.Unlock()
	m.set(what, done, total)
}

// end takes the bar away.
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
