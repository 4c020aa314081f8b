package lifecycle

import (
	"time"

	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/session"
)

// Payloads of the events that this package writes. Their fields are part of
// the record's format: they may be added to, not renamed.

type createdPayload struct {
	Spec       session.Spec      `json:"spec"` // without the values of its environment
	SpecDigest string            `json:"spec_digest"`
	Owner      session.Principal `json:"owner"`
	Template   string            `json:"template"`
	Node       session.NodeID    `json:"node"`
	Deadline   time.Time         `json:"deadline"`
}

type runningPayload struct {
	Template string         `json:"template"`
	Image    string         `json:"image"`
	Posture  driver.Posture `json:"posture"`
}

type endingPayload struct {
	Reason session.Reason `json:"reason"`
	Detail string         `json:"detail"`
}

type endedPayload struct {
	Result    audit.Result   `json:"result"`
	Reason    session.Reason `json:"reason"`
	Detail    string         `json:"detail,omitempty"`
	Residuals []string       `json:"residuals,omitempty"`
}

type exitedPayload struct {
	Code   int  `json:"code"`
	Signal int  `json:"signal,omitempty"`
	OOM    bool `json:"oom"`
	PIDs   bool `json:"pids,omitempty"` // the limit of threads was reached
}

type timeoutPayload struct {
	Seconds  session.Seconds `json:"timeout_seconds"`
	Deadline time.Time       `json:"deadline"`
}

type packetsPayload struct {
	Packets uint64 `json:"packets"`
}

type jumpPayload struct {
	Millis int64 `json:"ms"`
}

type recoveredPayload struct {
	Relinked bool `json:"relinked"`
}

type relinkedPayload struct {
	Cause string `json:"cause"`
}

// sandboxObject is the object of an event about a sandbox.
func sandboxObject(id session.SandboxID) string { return "sandbox/" + string(id) }
