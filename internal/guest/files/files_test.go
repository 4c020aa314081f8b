package files

import (
	"bytes"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"bivy/internal/guest/accounts"
)

func TestAcceptable(t *testing.T) {
	for value, want := range map[string][2]bool{
		"":                          {false, true},
		"gzip":                      {true, true},
		"gzip, deflate, br":         {true, true},
		"GZIP;Q=0.5":                {true, true},
		"gzip;q=0":                  {false, true},
		"gzip; q=0.0, *":            {false, true},
		"identity;q=0":              {false, false},
		"identity;q=0, gzip":        {true, false},
		"*;q=0":                     {false, false},
		"*;q=0, identity":           {false, true},
		"*":                         {true, true},
		"br, identity; q = 0":       {false, false},
		"x-gzip":                    {true, true},
		"gzip;q=nonsense,;q=0,,;;;": {true, true},
	} {
		if zip, plain := acceptable([]string{value}); [2]bool{zip, plain} != want {
			t.Errorf("%q: gzip %v, plain %v, want %v", value, zip, plain, want)
		}
	}
}

// FuzzUpload uploads arbitrary bodies: files are stored below the home directory,
// unless a name is absolute, and match the response.
func FuzzUpload(f *testing.F) {
	body := "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\ntext\r\n--b--\r\n"
	f.Add("multipart/form-data; boundary=b", "", "", []byte(body))
	f.Add("multipart/form-data; boundary=b", "named", "", []byte(body+body))
	f.Add("multipart/form-data; boundary=b", "", "gzip", []byte("\x1f\x8b\x08\x00"))
	f.Add("application/octet-stream", "p", "", []byte("bytes"))
	f.Add("application/octet-stream; a=b; a=c", "../..", "identity", []byte(nil))
	f.Add("multipart/form-data; boundary=\"\"", "", "", []byte("--\r\n\r\n"))
	f.Fuzz(func(t *testing.T, kind, path, encoding string, body []byte) {
		if strings.Contains(path, "..") || strings.HasPrefix(path, "/") || bytes.Contains(body, []byte("/")) || bytes.Contains(body, []byte("filename*")) || bytes.Contains(body, []byte("..")) {
			return // those may lead outside the home, with the user's rights
		}
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "passwd"), []byte("root:x:0:0::"+dir+"/home:/bin/sh\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		s := NewService(accounts.NewResolver(accounts.Open(filepath.Join(dir, "passwd"), ""), "", accounts.Settings{User: "root"}), slog.New(slog.DiscardHandler))
		r := httptest.NewRequest(http.MethodPost, "/files", bytes.NewReader(body))
		q := r.URL.Query()
		q.Set("path", path)
		r.URL.RawQuery = q.Encode()
		r.Header.Set("Content-Type", kind)
		r.Header.Set("Content-Encoding", encoding)
		written, err := s.Write(r, "")
		if err != nil {
			return
		}
		for _, w := range written {
			st, err := os.Stat(w.Path)
			if err != nil {
				continue // an escaped name
			}
			if st.Size() != w.Size || !strings.HasPrefix(w.Path, dir+"/home") {
				t.Errorf("%+v, but %d bytes", w, st.Size())
			}
		}
	})
}
