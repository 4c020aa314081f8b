package wire

import (
	"crypto/sha256"
	"encoding/base64"
	"strconv"
	"time"
)

// The operations a file signature can be for.
const (
	SignRead  = "read"
	SignWrite = "write"
)

// Sign returns the signature that lets the bearer of a URL read or write one
// file without the access token: path is the raw query value, user may be
// empty, and a zero expiry means that it never expires.
func Sign(path, operation, user, token string, expiry time.Time) string {
	text := path + ":" + operation + ":" + user + ":" + token
	if !expiry.IsZero() {
		text += ":" + strconv.FormatInt(expiry.Unix(), 10)
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}
