package client

import (
	"context"
	"encoding/json"
	"io"
	"iter"
)

// AuditKey returns the public key that the node signs records with, and the
// keys that it used before.
func (c *Client) AuditKey(ctx context.Context) (AuditKey, error) {
	var k AuditKey
	return k, c.json(ctx, "GET", "/v1/audit/key", nil, nil, &k, "")
}

// RotateAuditKey replaces the node's signing key and returns the new one, which
// the old one signs. It needs the role admin.
func (c *Client) RotateAuditKey(ctx context.Context, r RotateAuditKey) (AuditKey, error) {
	var k AuditKey
	return k, c.json(ctx, "POST", "/v1/audit/key/rotate", nil, r, &k, "")
}

// SystemRecord returns the node's system record in the form that is verified
// offline: what happened on the node outside sessions. The caller closes it.
func (c *Client) SystemRecord(ctx context.Context) (io.ReadCloser, error) {
	resp, err := c.send(ctx, call{method: "GET", path: "/v1/audit/system"})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// RecordListing lists the records of the node: the sealed ones in the order of
// sealing, then the open ones. After an error the sequence ends.
func (c *Client) RecordListing(ctx context.Context) iter.Seq2[ListedRecord, error] {
	return func(yield func(ListedRecord, error) bool) {
		resp, err := c.send(ctx, call{method: "GET", path: "/v1/audit/listing", accept: NDJSONType})
		if err != nil {
			yield(ListedRecord{}, err)
			return
		}
		err = lines(resp, func(r ListedRecord) error {
			if !yield(r, nil) {
				return errStop
			}
			return nil
		})
		if err != nil && err != errStop { //nolint:errorlint // errStop is never wrapped
			yield(ListedRecord{}, err)
		}
	}
}

// AuditHead returns a signed statement of what the node's records are now: a
// DSSE envelope. A copy that is kept elsewhere shows later whether a record was
// deleted, cut or replaced.
func (c *Client) AuditHead(ctx context.Context) (json.RawMessage, error) {
	var envelope json.RawMessage
	return envelope, c.json(ctx, "GET", "/v1/audit/head", nil, nil, &envelope, "")
}
