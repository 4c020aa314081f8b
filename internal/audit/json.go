package audit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// strict decodes JSON that has one meaning only: one value, no unknown and no
// repeated fields, names spelled exactly.
func strict(data []byte, v any) error {
	if err := checkNames(data); err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one value")
	}
	return nil
}

// maxDepth bounds the nesting of what strict decodes, sections included.
const maxDepth = 16

// checkNames refuses JSON whose meaning depends on the reader: names that
// occur twice in an object or differ only by case, which Go takes for the
// same, and names outside ASCII.
func checkNames(data []byte) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	type level struct {
		names map[string]bool // nil in an array
		value bool            // a value is next, not a name
	}
	var stack []level
	for {
		tok, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		top := len(stack) - 1
		if name, ok := tok.(string); ok && top >= 0 && stack[top].names != nil && !stack[top].value {
			if err := checkName(name, stack[top].names); err != nil {
				return err
			}
			stack[top].value = true
			continue
		}
		switch tok {
		case json.Delim('{'), json.Delim('['):
			if len(stack) == maxDepth {
				return fmt.Errorf("nested deeper than %d levels", maxDepth)
			}
			var l level
			if tok == json.Delim('{') {
				l.names = make(map[string]bool)
			}
			stack = append(stack, l)
			continue
		case json.Delim('}'), json.Delim(']'):
			stack = stack[:top]
		}
		if top = len(stack) - 1; top >= 0 {
			stack[top].value = false
		}
	}
}

func checkName(name string, seen map[string]bool) error {
	if !ascii(name) || name != strings.ToLower(name) && name != "payloadType" && name != "predicateType" {
		return fmt.Errorf("unexpected name %.64q", name)
	}
	if seen[name] {
		return fmt.Errorf("name %.64q occurs twice", name)
	}
	seen[name] = true
	return nil
}
