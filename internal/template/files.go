package template

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
)

// What is wrong with a file's content, as opposed to reading it.
var (
	errTooLong  = errors.New("over the limit")
	errNoDigest = errors.New("it holds no digest")
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
	d, err := ParseDigest(strings.TrimSuffix(string(b), "\n"))
	if err != nil {
		return "", fmt.Errorf("%s: %w: %w", name, errNoDigest, err)
	}
	return d, nil
}

// writeAtomic writes a file so that a crash leaves the old one or the new one.
func (s *Store) writeAtomic(name string, data []byte) error {
	tmp := tmpDir + "/file-" + rand.Text()
	if err := writeSync(s.root, tmp, data); err != nil {
		return errors.Join(err, s.removeFile(tmp))
	}
	if err := s.root.Rename(tmp, name); err != nil {
		return errors.Join(err, s.removeFile(tmp))
	}
	return syncDir(s.root, path.Dir(name))
}

func writeSync(root *os.Root, name string, data []byte) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// removeFile removes a file durably; one that is not there is no error.
func (s *Store) removeFile(name string) error {
	if err := s.root.Remove(name); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	return syncDir(s.root, path.Dir(name))
}

func syncDir(root *os.Root, name string) error {
	d, err := root.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
