package session

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// oneMeaning refuses JSON that encoding/json would read and another reader
// would read differently: a name that occurs twice in an object, of which Go
// takes the last, a field of the spec in other letters than its own, which Go
// takes for the field, and anything after the value.
func oneMeaning(data []byte) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	if err := walk(dec, "", 0); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("data after the spec ends at byte %d", dec.InputOffset())
	}
	return nil
}

// walk reads one value at path, names joined by points.
func walk(dec *json.Decoder, path string, depth int) error {
	tok, err := dec.Token()
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	if err != nil {
		return err
	}
	switch tok {
	case json.Delim('['):
		return fmt.Errorf("%s: a list where none belongs", orTop(path)) // no field of a spec is one
	case json.Delim('{'):
	default:
		return nil
	}
	seen := make(map[string]bool)
	for dec.More() {
		tok, err := dec.Token()
		if err != nil {
			return err
		}
		name, _ := tok.(string) // the decoder gives nothing else before a colon
		at := strings.TrimPrefix(path+"."+name, ".")
		if seen[name] {
			return fmt.Errorf("%.200q occurs twice", at)
		}
		// Names of variables and labels are their owner's; the others are ours.
		if (path == "" || path == "resources") && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz_") != "" {
			return fmt.Errorf("unknown field %.200q", at)
		}
		seen[name] = true
		if depth == 4 {
			return fmt.Errorf("%.200q is nested too deep", at)
		}
		if err := walk(dec, at, depth+1); err != nil {
			return err
		}
	}
	_, err = dec.Token() // the closing brace
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func orTop(path string) string {
	if path == "" {
		return "spec"
	}
	return fmt.Sprintf("%.200q", path)
}
