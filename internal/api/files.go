package api

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"bivy/client"
	"bivy/internal/kind"
)

func readFile(c *call) error {
	path, err := c.filePath("path")
	if err != nil {
		return err
	}
	r, info, err := c.h.o.Workload.ReadFile(c.ctx(), c.caller, c.session, path, c.param("user"))
	if err != nil {
		return err
	}
	defer r.Close()
	head, err := json.Marshal(fileOut(info))
	if err != nil {
		return err
	}
	// A header is ASCII; JSON can say everything in it.
	c.w.Header().Set(client.FileInfoHeader, asciiJSON(head))
	c.w.Header().Set("Content-Type", "application/octet-stream")
	// No length is promised: the file may grow or shrink while it is read. An
	// answer that is cut short does not end as an answer must.
	c.w.WriteHeader(http.StatusOK)
	buf := make([]byte, 64<<10)
	_, err = io.CopyBuffer(onlyWriter{c.w}, onlyReader{r}, buf)
	return err
}

// onlyWriter and onlyReader hide shortcuts with which io.CopyBuffer would
// leave its buffer unused.
type onlyWriter struct{ io.Writer }
type onlyReader struct{ io.Reader }

func asciiJSON(b []byte) string {
	out := make([]byte, 0, len(b))
	for _, r := range string(b) {
		if r < 0x80 {
			out = append(out, byte(r))
			continue
		}
		if r >= 0x10000 {
			r -= 0x10000
			out = appendEscape(out, 0xd800+r>>10)
			r = 0xdc00 + r&0x3ff
		}
		out = appendEscape(out, r)
	}
	return string(out)
}

func appendEscape(b []byte, r rune) []byte {
	const hex = "0123456789abcdef"
	return append(b, '\\', 'u', hex[r>>12&15], hex[r>>8&15], hex[r>>4&15], hex[r&15])
}

func writeFile(c *call) error {
	if err := c.wantType("application/octet-stream"); err != nil {
		return err
	}
	path, err := c.filePath("path")
	if err != nil {
		return err
	}
	body := &upload{c: c}
	info, err := c.h.o.Workload.WriteFile(c.ctx(), c.caller, c.session, path, c.param("user"), body, c.req.ContentLength)
	if err != nil {
		c.drain()
		if c.ctx().Err() != nil {
			return err
		}
		return body.cause(err)
	}
	return c.reply(http.StatusOK, fileOut(info))
}

// upload is a body on its way to a file. It notes what is wrong with the body
// itself, which is the caller's fault and not the session's. The transport may
// still read it while the answer is being handled, hence the lock.
type upload struct {
	c *call

	mu      sync.Mutex
	err     error
	aborted bool
}

func (u *upload) Read(p []byte) (int, error) {
	n, err := u.c.req.Body.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.err = err
	}
	return n, err
}

// Abort implements workload.Aborter.
func (u *upload) Abort() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.aborted = true
	_ = u.c.ctl.SetReadDeadline(time.Unix(1, 0))
}

// cause returns why a write failed with err: the body's own error comes first.
func (u *upload) cause(err error) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.err != nil && !u.aborted {
		return kind.Errorf(kind.Invalid, "reading the body: %w", u.err)
	}
	return err
}

func removeFile(c *call) error {
	path, err := c.filePath("path")
	if err != nil {
		return err
	}
	if err := c.noBody(); err != nil {
		return err
	}
	if err := c.h.o.Workload.Remove(c.ctx(), c.caller, c.session, path, c.param("user")); err != nil {
		return err
	}
	return c.nothing()
}

func statFile(c *call) error {
	path, err := c.filePath("path")
	if err != nil {
		return err
	}
	info, err := c.h.o.Workload.Stat(c.ctx(), c.caller, c.session, path, c.param("user"))
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, fileOut(info))
}

func listDir(c *call) error {
	path, err := c.filePath("path")
	if err != nil {
		return err
	}
	depth, err := c.number("depth", 1, 1, 64)
	if err != nil {
		return err
	}
	list, err := c.h.o.Workload.ListDir(c.ctx(), c.caller, c.session, path, c.param("user"), int(depth))
	if err != nil {
		return err
	}
	items := make([]client.FileInfo, 0, len(list))
	for _, f := range list {
		items = append(items, fileOut(f))
	}
	return page(c, items)
}

func makeDir(c *call) error {
	path, err := c.filePath("path")
	if err != nil {
		return err
	}
	if err := c.noBody(); err != nil {
		return err
	}
	info, err := c.h.o.Workload.MakeDir(c.ctx(), c.caller, c.session, path, c.param("user"))
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, fileOut(info))
}

func moveFile(c *call) error {
	from, err := c.filePath("path")
	if err != nil {
		return err
	}
	to, err := c.filePath("to")
	if err != nil {
		return err
	}
	if err := c.noBody(); err != nil {
		return err
	}
	info, err := c.h.o.Workload.Move(c.ctx(), c.caller, c.session, from, to, c.param("user"))
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, fileOut(info))
}
