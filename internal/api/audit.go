package api

import (
	"bufio"
	"encoding/json"
	"net/http"

	"bivy/client"
	"bivy/internal/audit"
	"bivy/internal/kind"
)

func auditKey(c *call) error {
	k, err := c.h.o.Node.AuditKey(c.ctx(), c.caller)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, k)
}

func rotateAuditKey(c *call) error {
	var in client.RotateAuditKey
	if err := c.decode(&in); err != nil {
		return err
	}
	if in.Lost {
		return kind.Errorf(kind.Conflict, "the signing key is not lost: this server uses it").WithField("lost").
			WithHint("leave out lost, so that the old key signs the new one")
	}
	if err := c.h.o.System.RotateKey(c.ctx(), c.caller); err != nil {
		return err
	}
	return auditKey(c)
}

func systemRecord(c *call) error {
	c.download("system")
	return c.h.o.System.Export(c.ctx(), c.caller, c.w)
}

// download makes the answer a file with a record in it.
func (c *call) download(name string) {
	c.w.Header().Set("Content-Type", client.NDJSONType)
	c.w.Header().Set(dispositionHeader, `attachment; filename="`+name+`.bivy-record"`)
}

const dispositionHeader = "Content-Disposition"

func auditHead(c *call) error {
	statement, err := c.h.o.System.Head(c.ctx(), c.caller)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, statement)
}

func recordListing(c *call) error {
	c.w.Header().Set("Content-Type", client.NDJSONType)
	out := bufio.NewWriterSize(c.w, outputBuffer)
	lines := json.NewEncoder(out)
	err := c.h.o.System.Listing(c.ctx(), c.caller, func(r audit.ListedRecord) error {
		return lines.Encode(client.ListedRecord{Record: string(r.Record), Seq: r.Seq, Hash: r.Hash, Sealed: r.Sealed})
	})
	if err != nil {
		return err // what is in the buffer is not sent
	}
	return out.Flush()
}
