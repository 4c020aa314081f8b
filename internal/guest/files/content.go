package files

import (
	"compress/gzip"
	"errors"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"bivy/internal/guest/accounts"
	"bivy/internal/guest/wire"
)

// HTTPError is an error of the plain HTTP endpoints, as it is sent to the client.
type HTTPError struct {
	Status int         // HTTP status
	Why    wire.Reason // sent in wire.HeaderReason; may be empty
	Text   string      // sent as the message
}

func (r *HTTPError) Error() string { return r.Text }

// Reason implements wire.ReasonError.
func (r *HTTPError) Reason() wire.Reason { return r.Why }

func badRequest(text string) error { return &HTTPError{http.StatusBadRequest, wire.ReasonPath, text} }

// account looks up the user that a request to the plain endpoints names.
func (s *Service) account(name string) (accounts.User, error) {
	u, err := s.resolver.User(name)
	var unknown *accounts.UnknownError
	if errors.As(err, &unknown) {
		return u, &HTTPError{http.StatusUnauthorized, wire.ReasonUser, err.Error()}
	}
	return u, err
}

// fileError turns an error of the file system into an HTTPError.
func fileError(path string, err error) error {
	var refused *HTTPError
	if err == nil || errors.As(err, &refused) {
		return err
	}
	rpc := pathError(path, err)
	var ce *connect.Error
	if !errors.As(rpc, &ce) {
		return err
	}
	status := http.StatusInternalServerError
	switch ce.Code() { //nolint:exhaustive // pathError uses these
	case connect.CodeInvalidArgument, connect.CodeFailedPrecondition, connect.CodeAlreadyExists:
		status = http.StatusBadRequest
	case connect.CodeNotFound:
		status = http.StatusNotFound
	case connect.CodePermissionDenied:
		status = http.StatusForbidden
	case connect.CodeResourceExhausted:
		status = http.StatusTooManyRequests
		if wire.ReasonOf(rpc) == wire.ReasonNoSpace {
			status = http.StatusInsufficientStorage
		}
	}
	return &HTTPError{status, wire.ReasonOf(rpc), ce.Message()}
}

// Read handles GET /files for the named user. When it returns an error it has not
// written a response.
func (s *Service) Read(w http.ResponseWriter, r *http.Request, username string) error {
	u, err := s.account(username)
	if err != nil {
		return err
	}
	path, err := s.resolver.Path(u, r.URL.Query().Get("path"))
	if err != nil {
		return badRequest(err.Error())
	}
	f, info, err := openRegular(u, path)
	if err != nil {
		return fileError(path, err)
	}
	defer f.Close()

	h := w.Header()
	h.Add("Vary", "Accept-Encoding")
	partial := r.Header.Get("Range") != "" || conditional(r.Header)
	zip, plain := acceptable(r.Header.Values("Accept-Encoding"))
	if !plain && (!zip || partial) {
		return &HTTPError{http.StatusNotAcceptable, "", "the file can only be sent with the encodings gzip or identity"}
	}
	// Files in /proc report size 0; reading one byte shows whether there is
	// content.
	var first [1]byte
	unsized := false
	if info.Size() == 0 {
		n, err := f.Read(first[:])
		if err != nil && !errors.Is(err, io.EOF) {
			return fileError(path, err)
		}
		unsized = n > 0
	}
	name := filepath.Base(path)
	h.Set("Content-Type", typeByName(name))
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": wire.Escape(name)}))
	switch {
	case zip && !partial && (info.Size() > 0 || unsized):
		h.Set("Content-Encoding", "gzip")
		setModified(h, info.ModTime())
		return sendGzip(w, f, first[:], unsized)
	case unsized:
		setModified(h, info.ModTime())
		if r.Method == http.MethodHead {
			return nil
		}
		if _, err := w.Write(first[:]); err != nil {
			return nil //nolint:nilerr // the client has disconnected
		}
		if _, err := io.Copy(w, f); err != nil {
			panic(http.ErrAbortHandler) // as in sendGzip
		}
		return nil
	}
	http.ServeContent(w, r, name, info.ModTime(), f)
	return nil
}

func sendGzip(w http.ResponseWriter, f io.Reader, first []byte, unsized bool) error {
	z, err := gzip.NewWriterLevel(w, gzip.BestSpeed)
	if err != nil {
		return err
	}
	if unsized {
		if _, err := z.Write(first); err != nil {
			return nil //nolint:nilerr // the client has disconnected
		}
	}
	if _, err := io.Copy(z, f); err != nil {
		// The status has been sent. Abort, so that the client sees an incomplete
		// response.
		panic(http.ErrAbortHandler)
	}
	_ = z.Close() // fails only when the client has gone
	return nil
}

// openRegular opens a file for reading and fails for anything but a regular file:
// reading a device or a FIFO could block or never end.
func openRegular(u accounts.User, path string) (f *os.File, info fs.FileInfo, err error) {
	err = u.Do(func() error {
		f, err = os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	info, err = f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		what := "is not a regular file"
		if info.IsDir() {
			what = "is a directory"
		}
		err = badRequest("path '" + wire.Escape(path) + "' " + what)
	}
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return f, info, nil
}

func setModified(h http.Header, t time.Time) {
	if t.Unix() > 0 {
		h.Set("Last-Modified", t.UTC().Format(http.TimeFormat))
	}
}

func conditional(h http.Header) bool {
	for _, name := range [...]string{"If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since", "If-Range"} {
		if h.Get(name) != "" {
			return true
		}
	}
	return false
}

// acceptable parses Accept-Encoding and reports whether the client accepts gzip
// and whether it accepts the file without encoding.
func acceptable(values []string) (zip, plain bool) {
	plain = true
	var star, starSeen, plainSeen, zipSeen bool
	for field := range strings.SplitSeq(strings.Join(values, ","), ",") {
		coding, params, _ := strings.Cut(field, ";")
		ok := true
		if q, found := strings.CutPrefix(strings.ReplaceAll(strings.ToLower(params), " ", ""), "q="); found {
			weight, err := strconv.ParseFloat(q, 64)
			ok = err != nil || weight > 0
		}
		switch strings.ToLower(strings.TrimSpace(coding)) {
		case "gzip", "x-gzip":
			zip, zipSeen = ok, true
		case "identity":
			plain, plainSeen = ok, true
		case "*":
			star, starSeen = ok, true
		}
	}
	if starSeen {
		if !zipSeen {
			zip = star
		}
		if !plainSeen {
			plain = star
		}
	}
	return zip, plain
}

// typeByName returns the media type for a file name, for types that browsers
// display. It does not read the guest's tables, which are large and untrusted.
func typeByName(name string) string {
	switch strings.ToLower(filepath.Ext(name)) {
	case ".txt", ".log", ".md", ".py", ".go", ".sh", ".c", ".h", ".rs", ".toml", ".ini", ".yaml", ".yml":
		return "text/plain; charset=utf-8"
	case ".htm", ".html":
		return "text/html; charset=utf-8"
	case ".css":
		return "text/css; charset=utf-8"
	case ".csv":
		return "text/csv; charset=utf-8"
	case ".js", ".mjs":
		return "text/javascript; charset=utf-8"
	case ".json":
		return "application/json"
	case ".xml":
		return "text/xml; charset=utf-8"
	case ".pdf":
		return "application/pdf"
	case ".png":
		return "image/png"
	case ".jpg", ".jpeg":
		return "image/jpeg"
	case ".gif":
		return "image/gif"
	case ".svg":
		return "image/svg+xml"
	case ".webp":
		return "image/webp"
	case ".mp4":
		return "video/mp4"
	case ".mp3":
		return "audio/mpeg"
	case ".wav":
		return "audio/wav"
	case ".zip":
		return "application/zip"
	case ".gz", ".tgz":
		return "application/gzip"
	case ".wasm":
		return "application/wasm"
	}
	return "application/octet-stream"
}
