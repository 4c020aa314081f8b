package guest_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"bivy/internal/guest/guestclient"
	"bivy/internal/guest/wire"
	"bivy/internal/kind"
)

// do sends a plain request over the host's socket, with the token unless the
// headers say otherwise.
func (s *sandbox) do(t *testing.T, method, target, body string, headers map[string]string) (*http.Response, string) {
	t.Helper()
	return do(t, s.dial, method, target, body, headers)
}

func do(t *testing.T, dial func(context.Context) (net.Conn, error), method, target, body string, headers map[string]string) (*http.Response, string) {
	t.Helper()
	tr := &http.Transport{
		DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		DisableCompression: true, DisableKeepAlives: true,
	}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://guest"+target, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(wire.HeaderToken, token)
	for k, v := range headers {
		if v == "" {
			req.Header.Del(k)
		} else {
			req.Header.Set(k, v)
		}
	}
	res, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res, string(text)
}

// http is do in one line: the status and the body.
func (s *sandbox) http(t *testing.T, method, target, body string, headers map[string]string) string {
	t.Helper()
	res, text := s.do(t, method, target, body, headers)
	return strings.TrimSpace(strconv.Itoa(res.StatusCode) + " " + text)
}

func TestAccess(t *testing.T) {
	s := startSandbox(t)
	ctx := t.Context()
	inside := func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", s.inside)
	}
	status := func(dial func(context.Context) (net.Conn, error), method, target, body string, h map[string]string) int {
		res, _ := do(t, dial, method, target, body, h)
		return res.StatusCode
	}
	none := map[string]string{wire.HeaderToken: ""}
	initBody := `{"accessToken":"mine"}`

	// Before the initialisation every request is refused.
	if got := status(s.dial, "GET", "/metrics", "", none); got != 503 {
		t.Errorf("metrics before init: %d", got)
	}
	if got := status(inside, "POST", "/init", initBody, none); got != 403 {
		t.Errorf("init from inside: %d", got)
	}
	res, err := s.Init(ctx, wire.InitRequest{Hostname: "before"})
	if err != nil || res.Generation != 1 || res.Version != wire.Version {
		t.Fatalf("%+v, %v", res, err)
	}
	// Without a token the host has access and programs inside have not.
	if got := status(s.dial, "GET", "/metrics", "", none); got != 200 {
		t.Errorf("host without token: %d", got)
	}
	if got := status(inside, "GET", "/metrics", "", none); got != 401 {
		t.Errorf("inside without token: %d", got)
	}
	if res, err = s.Init(ctx, wire.InitRequest{AccessToken: token, EnvVars: map[string]string{"A": "1", "E2B_SANDBOX_ID": "abc"}, Hostname: "after", DefaultUser: "other", DefaultWorkdir: "/usr", Timestamp: time.Now().Add(time.Hour)}); err != nil || res.Generation != 2 {
		t.Fatalf("%+v, %v", res, err)
	}
	if d := res.ClockOffset - time.Hour; d.Abs() > time.Minute || res.ClockSet {
		t.Errorf("clock: %+v", res)
	}
	for name, tt := range map[string]struct{ got, want int }{
		"metrics without token":     {status(s.dial, "GET", "/metrics", "", none), 401},
		"metrics with wrong token":  {status(s.dial, "GET", "/metrics", "", map[string]string{wire.HeaderToken: "wrong"}), 401},
		"metrics with token":        {status(s.dial, "GET", "/metrics", "", nil), 200},
		"inside with token":         {status(inside, "GET", "/metrics", "", nil), 200},
		"inside without token":      {status(inside, "GET", "/metrics", "", none), 401},
		"inside, rpc without token": {status(inside, "POST", "/process.Process/List", "{}", map[string]string{wire.HeaderToken: "", "Content-Type": "application/json"}), 401},
		"inside, init with token":   {status(inside, "POST", "/init", initBody, nil), 403},
		"inside, reclaim":           {status(inside, "POST", "/reclaim", "", nil), 403},
		"inside, health":            {status(inside, "GET", "/health", "", none), 204},
		"init without token":        {status(s.dial, "POST", "/init", initBody, none), 401},
		"init with wrong token":     {status(s.dial, "POST", "/init", initBody, map[string]string{wire.HeaderToken: "x"}), 401},
		"nothing there":             {status(s.dial, "GET", "/nothing", "", nil), 404},
		"wrong method":              {status(s.dial, "DELETE", "/metrics", "", nil), 405},
		"init by GET":               {status(s.dial, "GET", "/init", "", nil), 405},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: %d, want %d", name, tt.got, tt.want)
		}
	}
	for name, tt := range map[string]struct{ body, want string }{
		"unknown field": {`{"nonsense":1}`, `unknown field \"nonsense\"`}, "not JSON": {`{`, "not an initialisation"},
		"bad variable": {`{"envVars":{"A=":"1"}}`, "envVars"}, "bad host name": {`{"hostname":"a b"}`, "hostname"},
		"unknown user": {`{"defaultUser":"nobody at all"}`, "defaultUser"}, "bad token": {`{"accessToken":"a b"}`, "accessToken"}, "bad directory": {`{"defaultWorkdir":"~root"}`, "defaultWorkdir"},
	} {
		if got := s.http(t, "POST", "/init", tt.body, nil); !strings.HasPrefix(got, "400 ") || !strings.Contains(got, tt.want) {
			t.Errorf("%s: %s", name, got)
		}
	}
	if got := s.http(t, "GET", "/envs", "", nil); got != `200 {"A":"1","E2B_SANDBOX_ID":"abc"}` {
		t.Errorf("envs: %s", got)
	}
	r := s.sh(t, "hostname; id -un 2>/dev/null; pwd; cat "+s.dir+"/run/e2b/.E2B_SANDBOX_ID; grep -c bivy "+s.dir+"/etc/hosts")
	if r := strings.Split(r.stdout, "\n"); r[0] != "after" || r[len(r)-3] != "/usr" || r[len(r)-2] != "abc1" {
		t.Errorf("got %q", r)
	}
	// After a lost response the agent has the new token and the client the old.
	if _, err := guestclient.New(guestclient.Config{Dial: s.dial, Token: token}).Init(ctx, wire.InitRequest{AccessToken: "next"}); err != nil {
		t.Fatal(err)
	}
	if res, err := s.Init(ctx, wire.InitRequest{AccessToken: "next"}); err != nil || res.Generation != 4 {
		t.Errorf("again: %+v, %v", res, err)
	}
	if _, err := guestclient.New(guestclient.Config{Dial: s.dial, Token: "stale"}).Processes(ctx); kind.Of(err) != kind.Unauthentic {
		t.Errorf("stale token: %v", err)
	}
	var m wire.Metrics
	answer, text := s.do(t, http.MethodGet, "/metrics", "", map[string]string{wire.HeaderToken: "next"})
	if err := json.Unmarshal([]byte(text), &m); err != nil || answer.StatusCode != http.StatusOK || m.CPUCount < 1 || m.MemTotal == 0 || m.MemUsed == 0 || m.DiskTotal == 0 {
		t.Errorf("metrics %+v, %v", m, err)
	}
}

// TestHostileHosts replaces the hosts file as root in the sandbox by files that
// must not block an initialisation.
func TestHostileHosts(t *testing.T) {
	s := newSandbox(t)
	hosts := s.dir + "/etc/hosts"
	for name, script := range map[string]string{
		"pipe": "mkfifo " + hosts, "huge": "truncate -s 8T " + hosts, "device": "ln -s /dev/zero " + hosts, "directory": "mkdir " + hosts,
	} {
		if r := s.run(t, guestclient.Command{Argv: []string{"/bin/sh", "-c", "rm -rf " + hosts + "; " + script}, User: "root"}); r.exit.Code != 0 {
			t.Fatalf("%s: %+v", name, r)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		if _, err := s.Init(ctx, wire.InitRequest{Hostname: "again", AccessToken: token}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
	}
}

// TestHidden checks that a user can neither read the agent's memory nor signal it.
func TestHidden(t *testing.T) {
	s := newSandbox(t)
	for _, path := range []string{"/proc/1/environ", "/proc/1/mem", "/proc/1/maps", "/proc/1/fd/3", "/proc/1/cwd/x"} {
		if r := s.sh(t, "head -c 1 "+path); r.exit.Code == 0 || r.stdout != "" {
			t.Errorf("%s can be read: %+v", path, r)
		}
	}
	for _, sig := range []string{"TERM", "KILL", "QUIT"} {
		if r := s.sh(t, "kill -"+sig+" 1"); r.exit.Code == 0 {
			t.Errorf("a user can send %s to process 1", sig)
		}
	}
	// Root in the sandbox cannot kill or stop process 1 either.
	r := s.run(t, guestclient.Command{Argv: []string{"/bin/sh", "-c", "kill -KILL 1; kill -STOP 1; echo alive"}, User: "root"})
	if r.stdout != "alive\n" {
		t.Errorf("got %+v", r)
	}
	if err := s.Health(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestSignedURLs(t *testing.T) {
	s := newSandbox(t)
	s.write(t, "", "hello.txt", "hello")
	none := map[string]string{wire.HeaderToken: ""}
	q := func(v url.Values) string { return "/files?" + v.Encode() }
	sign := func(op, path, user string, expiry time.Time) url.Values {
		v := url.Values{"path": {path}, "signature": {wire.Sign(path, op, user, token, expiry)}}
		if user != "" {
			v.Set("username", user)
		}
		if !expiry.IsZero() {
			v.Set("signature_expiration", strconv.FormatInt(expiry.Unix(), 10))
		}
		return v
	}
	future, past := time.Now().Add(time.Hour), time.Now().Add(-time.Hour)
	upload := map[string]string{wire.HeaderToken: "", "Content-Type": "application/octet-stream"}
	for name, tt := range map[string]struct {
		method, target string
		headers        map[string]string
		want           string
	}{
		"unsigned":        {"GET", "/files?path=hello.txt", none, `401 {"code":401,"message":"missing signature query parameter"}`},
		"signed":          {"GET", q(sign("read", "hello.txt", "", time.Time{})), none, "200 hello"},
		"for a user":      {"GET", q(sign("read", "hello.txt", "user", future)), none, "200 hello"},
		"expired":         {"GET", q(sign("read", "hello.txt", "user", past)), none, `401 {"code":401,"message":"signature is already expired"}`},
		"for writing":     {"GET", q(sign("write", "hello.txt", "", time.Time{})), none, `401 {"code":401,"message":"invalid signature"}`},
		"expiry changed":  {"GET", q(sign("read", "hello.txt", "", past)) + "9", none, `401 {"code":401,"message":"invalid signature"}`},
		"expiry nonsense": {"GET", q(sign("read", "hello.txt", "", time.Time{})) + "&signature_expiration=1e9", none, `401 {"code":401,"message":"invalid signature"}`},
		"other path":      {"GET", strings.Replace(q(sign("read", "hello.txt", "", time.Time{})), "hello.txt", "other.txt", 1), none, `401 {"code":401,"message":"invalid signature"}`},
		"wrong token":     {"GET", q(sign("read", "hello.txt", "", time.Time{})), map[string]string{wire.HeaderToken: "x"}, `401 {"code":401,"message":"the access token is wrong"}`},
		"unknown user":    {"GET", q(sign("read", "hello.txt", "who", time.Time{})), none, `401 {"code":401,"message":"invalid username: 'who'"}`},
		"written as root": {"POST", q(sign("write", s.dir+"/by-root", "root", future)), upload, "200 "},
	} {
		if got := s.http(t, tt.method, tt.target, "", tt.headers); !strings.HasPrefix(got, tt.want) || (tt.want != "200 " && got != tt.want) {
			t.Errorf("%s: got %s, want %s", name, got, tt.want)
		}
	}
	if st, err := os.Stat(s.dir + "/by-root"); err != nil || st.Mode().Perm() != 0o644 {
		t.Errorf("by root: %v, %v", st, err)
	}
}

func zip(t *testing.T, text string) string {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := io.WriteString(z, text); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func form(t *testing.T, parts ...[3]string) (body, kind string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for _, p := range parts { // field, filename, content
		part, err := w.CreatePart(map[string][]string{"Content-Disposition": {fmt.Sprintf(`form-data; name="%s"; filename="%s"`, p[0], p[1])}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(part, p[2]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String(), w.FormDataContentType()
}

func TestUploads(t *testing.T) {
	s := newSandbox(t)
	post := func(query, body, kind, encoding string) string {
		return s.http(t, "POST", "/files"+query, body, map[string]string{"Content-Type": kind, "Content-Encoding": encoding})
	}
	body, kind := form(t, [3]string{"file", "one", "1"}, [3]string{"other", "no", "no"}, [3]string{"file", "sub/two", "22"})
	if got := post("", body, kind, ""); !strings.HasPrefix(got, `200 [{"name":"one","path":"`+s.home+`/one","type":"file","size":1,`) || !strings.Contains(got, `"path":"`+s.home+`/sub/two"`) {
		t.Error(got)
	}
	if got := post("", zip(t, body), kind, "gzip"); !strings.HasPrefix(got, "200 ") {
		t.Error(got)
	}
	one, kind1 := form(t, [3]string{"file", "", "via path"})
	if got := post("?path=named", one, kind1, ""); !strings.HasPrefix(got, `200 [{"name":"named"`) {
		t.Error(got)
	}
	if got, err := s.read(t, "", "named"); err != nil || got != "via path" {
		t.Error(got, err)
	}
	if got := post("?path=raw", zip(t, "zipped"), "application/octet-stream", "gzip"); !strings.HasPrefix(got, "200 ") {
		t.Error(got)
	}
	if got, err := s.read(t, "", "raw"); err != nil || got != "zipped" {
		t.Error(got, err)
	}
	twice, kind2 := form(t, [3]string{"file", "x", "1"}, [3]string{"file", "~/x", "2"})
	noName, kind3 := form(t, [3]string{"file", "", "1"})
	noFile, kind4 := form(t, [3]string{"other", "x", "1"})
	for name, tt := range map[string]struct{ query, body, kind, encoding, want string }{
		"twice":           {"", twice, kind2, "", "twice"},
		"two for a path":  {"?path=p", body, kind, "", "twice"},
		"no filename":     {"", noName, kind3, "", "no filename"},
		"no file":         {"", noFile, kind4, "", "no part named file"},
		"no path":         {"", "x", "application/octet-stream", "", "path: missing"},
		"odd type":        {"?path=x", "x", "text/plain", "", "Content-Type"},
		"no type":         {"?path=x", "x", "", "", "Content-Type"},
		"odd encoding":    {"?path=x", "x", "application/octet-stream", "br", "Content-Encoding"},
		"not gzip":        {"?path=x", "x", "application/octet-stream", "gzip", "not gzip"},
		"cut gzip":        {"?path=cut", zip(t, "zipped")[:14], "application/octet-stream", "gzip", "ends early"},
		"cut multipart":   {"", body[:len(body)-30], kind, "", "early"},
		"no boundary":     {"", body, "multipart/form-data", "", "boundary"},
		"another's home":  {"?path=~root/x", "x", "application/octet-stream", "", "another user"},
		"NUL in the path": {"?path=a%00b", "x", "application/octet-stream", "", "NUL"},
	} {
		got := post(tt.query, tt.body, tt.kind, tt.encoding)
		if !strings.HasPrefix(got, `400 {"code":400,"message":"`) || !strings.Contains(got, tt.want) {
			t.Errorf("%s: %s", name, got)
		}
	}
	if _, err := os.Stat(s.home + "/cut"); err == nil {
		t.Error("an incomplete upload left a file")
	}
	// A client that disconnects during an upload leaves no file either.
	conn, err := s.dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "POST /files?path=half HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Type: application/octet-stream\r\nContent-Length: 1000\r\n\r\nhalf", wire.HeaderToken, token)
	eventually(t, "the file is begun", func() bool { _, err := os.Stat(s.home + "/half"); return err == nil })
	conn.Close()
	eventually(t, "the half is removed", func() bool { _, err := os.Stat(s.home + "/half"); return err != nil })
}

func TestCompose(t *testing.T) {
	s := newSandbox(t)
	s.write(t, "", "p1", "one ")
	s.write(t, "", "p2", "two")
	got := s.http(t, "POST", "/files/compose", `{"source_paths":["p1","~/p2"],"destination":"out/all"}`, nil)
	if !strings.HasPrefix(got, `200 {"name":"all","path":"`+s.home+`/out/all","type":"file","size":7,`) {
		t.Error(got)
	}
	if got, err := s.read(t, "", "out/all"); err != nil || got != "one two" {
		t.Error(got, err)
	}
	if _, err := os.Stat(s.home + "/p1"); err == nil {
		t.Error("a source is left")
	}
	for name, tt := range map[string]struct{ body, want string }{
		"missing source": {`{"source_paths":["nothing"],"destination":"out/all"}`, "404"},
		"into itself":    {`{"source_paths":["out/all"],"destination":"~/out/all"}`, "400"},
		"no sources":     {`{"source_paths":[],"destination":"x"}`, "400"},
		"no body":        {``, "400"},
		"unknown user":   {`{"source_paths":["out/all"],"destination":"x","username":"who"}`, "401"},
	} {
		if got := s.http(t, "POST", "/files/compose", tt.body, nil); !strings.HasPrefix(got, tt.want) {
			t.Errorf("%s: %s", name, got)
		}
	}
	if got, err := s.read(t, "", "out/all"); err != nil || got != "one two" {
		t.Errorf("a refused request changed the destination: %q, %v", got, err)
	}
}

func TestDownloads(t *testing.T) {
	s := newSandbox(t)
	text := strings.Repeat("0123456789", 1000)
	s.write(t, "", "f.txt", text)
	s.write(t, "", "empty", "")
	get := func(path string, h map[string]string) (*http.Response, string) {
		return s.do(t, "GET", "/files?path="+path, "", h)
	}
	res, body := get("f.txt", nil)
	if res.StatusCode != 200 || body != text || res.ContentLength != 10000 || res.Header.Get("Content-Type") != "text/plain; charset=utf-8" ||
		res.Header.Get("Content-Disposition") != "inline; filename=f.txt" || res.Header.Get("Vary") != "Accept-Encoding" {
		t.Errorf("plain: %d, %d bytes, %v", res.StatusCode, len(body), res.Header)
	}
	modified := res.Header.Get("Last-Modified")
	res, body = get("f.txt", map[string]string{"Accept-Encoding": "gzip, deflate"})
	z, err := gzip.NewReader(strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if plain, err := io.ReadAll(z); err != nil || string(plain) != text || res.Header.Get("Content-Encoding") != "gzip" || len(body) > 1000 {
		t.Errorf("gzip: %v, %v", err, res.Header)
	}
	res, body = get("empty", map[string]string{"Accept-Encoding": "gzip"})
	if res.StatusCode != 200 || body != "" || res.Header.Get("Content-Length") != "0" || res.Header.Get("Content-Encoding") != "" {
		t.Errorf("empty: %v", res.Header)
	}
	res, body = get("f.txt", map[string]string{"Range": "bytes=10-14", "Accept-Encoding": "gzip"})
	if res.StatusCode != 206 || body != "01234" || res.Header.Get("Content-Range") != "bytes 10-14/10000" || res.Header.Get("Content-Encoding") != "" {
		t.Errorf("range: %d %q %v", res.StatusCode, body, res.Header)
	}
	if res, _ = get("f.txt", map[string]string{"Range": "bytes=20000-"}); res.StatusCode != 416 {
		t.Errorf("range: %d", res.StatusCode)
	}
	if res, _ = get("f.txt", map[string]string{"If-Modified-Since": modified, "Accept-Encoding": "gzip"}); res.StatusCode != 304 {
		t.Errorf("conditional: %d", res.StatusCode)
	}
	if res, _ = get("f.txt", map[string]string{"Accept-Encoding": "br, identity;q=0"}); res.StatusCode != 406 {
		t.Errorf("unacceptable: %d", res.StatusCode)
	}
	if res, body = get("/proc/version", nil); res.StatusCode != 200 || body == "" {
		t.Errorf("/proc/version: %d %q", res.StatusCode, body)
	}
	if got := s.http(t, "GET", "/files?path=nothing", "", nil); got != `404 {"code":404,"message":"path '`+s.home+`/nothing' does not exist"}` {
		t.Error(got)
	}
	if got := s.http(t, "GET", "/files?path=~", "", nil); !strings.HasPrefix(got, `400 {"code":400,"message":"path '`+s.home+`' is a directory`) {
		t.Error(got)
	}
	// A name that is not UTF-8, percent-encoded as bytes.
	s.write(t, "", "\xff.txt", "odd")
	if got := s.http(t, "GET", "/files?path=%ff.txt", "", nil); got != "200 odd" {
		t.Error(got)
	}
	res, _ = s.do(t, "OPTIONS", "/files?path=x", "", map[string]string{"Origin": "https://x", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-access-token"})
	if res.StatusCode != 204 || res.Header.Get("Access-Control-Allow-Headers") != "x-access-token" || res.Header.Get("Access-Control-Max-Age") != "7200" {
		t.Errorf("preflight: %d %v", res.StatusCode, res.Header)
	}
}

// frames decodes a stream of connect+json.
func frames(t *testing.T, body string) (messages []map[string]any, end map[string]any) {
	t.Helper()
	for len(body) > 0 {
		if len(body) < 5 {
			t.Fatalf("half a frame: %q", body)
		}
		n := binary.BigEndian.Uint32([]byte(body[1:5]))
		var m map[string]any
		if err := json.Unmarshal([]byte(body[5:5+n]), &m); err != nil {
			t.Fatal(err)
		}
		if body[0] == 2 {
			end = m
		} else {
			messages = append(messages, m)
		}
		body = body[5+n:]
	}
	return messages, end
}

func frame(text string) string {
	var head [5]byte
	binary.BigEndian.PutUint32(head[1:], uint32(len(text)))
	return string(head[:]) + text
}

// TestJSON uses the protocol in JSON, as E2B's clients do.
func TestJSON(t *testing.T) {
	s := newSandbox(t)
	stream := map[string]string{"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1", "Authorization": "Basic dXNlcjo="}
	res, body := s.do(t, "POST", "/process.Process/Start", frame(`{"process":{"cmd":"/bin/bash","args":["-l","-c","printf hi; exit 3"],"envs":{}},"stdin":false}`), stream)
	if res.StatusCode != 200 || res.Header.Get("Content-Type") != "application/connect+json" {
		t.Fatalf("%d %v", res.StatusCode, res.Header)
	}
	messages, end := frames(t, body)
	text, err := json.Marshal(messages)
	if err != nil {
		t.Fatal(err)
	}
	pid := messages[0]["event"].(map[string]any)["start"].(map[string]any)["pid"]
	want := fmt.Sprintf(`[{"event":{"start":{"pid":%v}}},{"event":{"data":{"stdout":"aGk="}}},{"event":{"end":{"error":"exit status 3","exitCode":3,"exited":true,"status":"exit status 3"}}}]`, pid)
	if string(text) != want || len(end) != 0 {
		t.Errorf("got %s, end %v\nwant %s", text, end, want)
	}
	_, body = s.do(t, "POST", "/process.Process/Start", frame(`{"process":{"cmd":"nope"}}`), stream)
	if messages, end := frames(t, body); len(messages) != 0 || end["error"].(map[string]any)["code"] != "invalid_argument" {
		t.Errorf("got %v, %v", messages, end)
	}
	stream["Connect-Timeout-Ms"] = "200"
	_, body = s.do(t, "POST", "/process.Process/Start", frame(`{"process":{"cmd":"sleep","args":["1000"]}}`), stream)
	if messages, end := frames(t, body); len(messages) != 1 || end["error"].(map[string]any)["code"] != "deadline_exceeded" {
		t.Errorf("got %v, %v", messages, end)
	}
	stream["Authorization"] = "Basic d2hvOg=="
	_, body = s.do(t, "POST", "/process.Process/Start", frame(`{"process":{"cmd":"true"}}`), stream)
	if _, end := frames(t, body); fmt.Sprint(end["error"]) != "map[code:unauthenticated message:invalid username: 'who']" {
		t.Errorf("got %v", end)
	}
	unary := map[string]string{"Content-Type": "application/json"}
	res, body = s.do(t, "POST", "/filesystem.Filesystem/Stat", `{"path":"/no/such"}`, unary)
	if res.StatusCode != 404 || body != `{"code":"not_found","message":"path '/no/such' does not exist"}` {
		t.Errorf("%d %s", res.StatusCode, body)
	}
	res, body = s.do(t, "POST", "/filesystem.Filesystem/MakeDir", `{"path":"~"}`, unary)
	if res.StatusCode != 409 || !strings.Contains(body, `"already_exists"`) {
		t.Errorf("%d %s", res.StatusCode, body)
	}
	// Larger than a request may be.
	res, body = s.do(t, "POST", "/process.Process/SendInput", `{"process":{"pid":1},"input":{"stdin":"`+strings.Repeat("AAAA", 5<<20)+`"}}`, unary)
	if !strings.Contains(body, "resource_exhausted") {
		t.Errorf("%d %.200s", res.StatusCode, body)
	}
}

func TestKeepalive(t *testing.T) {
	s := newSandbox(t)
	_, body := s.do(t, "POST", "/process.Process/Start", frame(`{"process":{"cmd":"sleep","args":["1.5"]}}`),
		map[string]string{"Content-Type": "application/connect+json", wire.HeaderKeepalive: "1"})
	messages, _ := frames(t, body)
	text, err := json.Marshal(messages)
	if err != nil || !strings.Contains(string(text), `{"event":{"keepalive":{}}}`) {
		t.Errorf("got %s, %v", text, err)
	}
}
