// Command pack compresses the binaries named as arguments into the payload of
// package bundle and writes its manifest.
package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"log"
	"os"
	"path/filepath"

	"github.com/klauspost/compress/zstd"

	"bivy/internal/bundle"
)

func main() {
	out := flag.String("out", "internal/bundle/payload", "directory of the payload")
	build := flag.String("build", "", "build id, the version string of bivy-sentry")
	flag.Parse()
	if err := pack(*out, *build, flag.Args()); err != nil {
		log.Fatal("pack: ", err)
	}
}

func pack(out, build string, files []string) error {
	m := bundle.Manifest{Build: build, SHA256: map[string]string{}}
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBetterCompression))
	if err != nil {
		return err
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(data)
		m.SHA256[filepath.Base(f)] = hex.EncodeToString(sum[:])
		if err := os.WriteFile(filepath.Join(out, filepath.Base(f)+".zst"), enc.EncodeAll(data, nil), 0o644); err != nil {
			return err
		}
	}
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(out, "manifest.json"), append(b, '\n'), 0o644)
}
