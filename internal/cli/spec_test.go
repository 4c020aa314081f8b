package cli

import (
	"testing"

	"bivy/internal/kind"
)

// FuzzParseSpec: no file causes a panic, every error is Invalid, and an accepted
// spec is valid and always has the same digest.
func FuzzParseSpec(f *testing.F) {
	for _, seed := range []string{
		"version: 1\n", "version: 1\ntemplate: base\ntimeout_seconds: 60\n", "version: 1\nenv: {A: b}\nlabels: {t: \"x\"}\n",
		"{\"version\": 1, \"resources\": {\"cpu_millis\": 1000, \"memory_mib\": 512, \"disk_mib\": 64, \"pids\": 100}}",
		"version: 2\n", "version: 1\nversion: 1\n", "version: 1\nworkdir: relative\n", "version: 1\nenv: {\"\\0\": x}\n", "\xff",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := parseSpec(data)
		if err != nil {
			if !kind.Is(err, kind.Invalid) {
				t.Errorf("%v is %s", err, kind.Of(err))
			}
			return
		}
		if s.Version == 0 {
			t.Errorf("accepted without a version: %+v", s)
		}
		full := s.WithDefaults()
		a, err := full.Digest()
		if err != nil {
			t.Fatal(err)
		}
		if b, err := full.WithDefaults().Digest(); err != nil || a != b {
			t.Errorf("digests %s and %s, %v", a, b, err)
		}
	})
}
