package template

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"bivy/internal/durable"
)

// Errors in the content of a file, as opposed to errors of reading it.
var (
	errTooLong  = errors.New("exceeds the limit")
	errNoDigest = errors.New("not a digest")
)

// readFile reads a small file of the store.
func readFile(root *os.Root, name string, limit int64) ([]byte, error) {
	f, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("%s: %w of %d bytes", name, errTooLong, limit)
	}
	return b, nil
}

func (s *Store) readDigest(name string) (Digest, error) {
	b, err := readFile(s.root, name, 128)
	if err != nil {
		return "", err
	}
	d, err := parseDigest(strings.TrimSuffix(string(b), "\n"))
	if err != nil {
		return "", fmt.Errorf("%s: %w: %w", name, errNoDigest, err)
	}
	return d, nil
}

// writeFile writes a file of the store, readable by its owner only.
func (s *Store) writeFile(name string, data []byte) error {
	return durable.WriteFileIn(s.root, name, data, 0o600)
}
