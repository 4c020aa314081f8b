package wire

import (
	"crypto/sha256"
	"encoding/base64"
	"strconv"
	"time"
)

// The operations that a file signature permits.
const (
	SignRead  = "read"
	SignWrite = "write"
)

// Sign returns the signature for a URL that permits one operation on one file
// without the access token. path is the raw value of the query; user may be empty;
// a zero expiry means that the signature does not expire.
func Sign(path, operation, user, token string, expiry time.Time) string {
	text := path + ":" + operation + ":" + user + ":" + token
	if !expiry.IsZero() {
		text += ":" + strconv.FormatInt(expiry.Unix(), 10)
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}
