package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"

	"bivy/internal/kind"
)

// decodeStrict reads one JSON document into v, a pointer to a wire type. It
// refuses what encoding/json lets pass: unknown and duplicate fields, names
// in another case, null, numbers that do not fit, text that is not UTF-8,
// and data after the document. The error names the field.
//
// With cut, data is the beginning of a document that was too long to be read;
// decodeStrict then says which field made it so.
func decodeStrict(data []byte, cut bool, v any) error {
	if !cut && !utf8.Valid(data) {
		return kind.Errorf(kind.Invalid, "the body is not UTF-8")
	}
	w := &walker{dec: json.NewDecoder(bytes.NewReader(data)), data: data}
	w.dec.UseNumber()
	err := w.value(reflect.TypeOf(v).Elem(), "")
	if err == nil {
		if _, e := w.dec.Token(); !errors.Is(e, io.EOF) {
			err = kind.Errorf(kind.Invalid, "data after the end of the document at byte %d", w.dec.InputOffset())
		}
	}
	if cut {
		e := kind.Errorf(kind.Invalid, "larger than the %d bytes a body may have", len(data))
		if field := w.largest(); field != "" {
			e = e.WithField(field)
		}
		return e.WithHint("write large values to a file and upload it")
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return kind.Errorf(kind.Invalid, "%w", err)
	}
	return nil
}

// walker compares a document with a type, token by token.
type walker struct {
	dec  *json.Decoder
	data []byte
	top  []span // the fields of the outermost object
}

type span struct {
	name       string
	start, end int64
}

// largest returns the outermost field that takes most of the document.
func (w *walker) largest() string {
	name, most := "", int64(0)
	for _, s := range w.top {
		end := s.end
		if end == 0 {
			end = int64(len(w.data))
		}
		if end-s.start > most {
			name, most = s.name, end-s.start
		}
	}
	return name
}

func invalid(path, format string, args ...any) error {
	return kind.Errorf(kind.Invalid, format, args...).WithField(path)
}

func (w *walker) token(path string) (json.Token, error) {
	tok, err := w.dec.Token()
	switch {
	case err == nil:
		return tok, nil
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		if len(bytes.TrimSpace(w.data)) == 0 {
			return nil, kind.Errorf(kind.Invalid, "the body is empty; want a JSON object")
		}
		return nil, invalid(path, "the document ends early, at byte %d", len(w.data))
	}
	return nil, invalid(path, "not JSON at byte %d: %s", w.dec.InputOffset(), strings.TrimPrefix(err.Error(), "json: "))
}

func (w *walker) value(t reflect.Type, path string) error {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	tok, err := w.token(path)
	if err != nil {
		return err
	}
	switch tok := tok.(type) {
	case json.Delim:
		switch {
		case tok == '{' && t.Kind() == reflect.Struct:
			return w.object(path, fieldsOf(t), nil)
		case tok == '{' && t.Kind() == reflect.Map:
			return w.object(path, nil, t.Elem())
		case tok == '[' && t.Kind() == reflect.Slice && t.Elem().Kind() != reflect.Uint8:
			return w.array(path, t.Elem())
		}
		return invalid(path, "want %s", nameOf(t))
	case string:
		if t.Kind() != reflect.String && !isBytes(t) {
			return invalid(path, "%.40q is text; want %s", tok, nameOf(t))
		}
		return w.text(path, tok)
	case json.Number:
		return number(path, tok, t)
	case bool:
		if t.Kind() != reflect.Bool {
			return invalid(path, "%t; want %s", tok, nameOf(t))
		}
	case nil:
		if path == "" {
			return kind.Errorf(kind.Invalid, "null; want %s", nameOf(t))
		}
		return invalid(path, "null; want %s, or leave it out", nameOf(t))
	}
	return nil
}

// text refuses strings that the decoder has repaired: half a surrogate pair
// becomes U+FFFD silently.
func (w *walker) text(path, s string) error {
	if strings.ContainsRune(s, utf8.RuneError) && !bytes.ContainsRune(w.data, utf8.RuneError) &&
		!bytes.Contains(bytes.ToLower(w.data), []byte(`\ufffd`)) {
		return invalid(path, "half a surrogate pair")
	}
	return nil
}

// object reads the rest of an object: of a struct when fields is not nil,
// else of a map with values of type elem.
func (w *walker) object(path string, fields map[string]reflect.Type, elem reflect.Type) error {
	seen := map[string]bool{}
	for w.dec.More() {
		tok, err := w.token(path)
		if err != nil {
			return err
		}
		name, ok := tok.(string)
		if !ok {
			return invalid(path, "not JSON at byte %d: a name is missing", w.dec.InputOffset())
		}
		at := join(path, name)
		if seen[name] {
			return invalid(at, "given twice")
		}
		seen[name] = true
		t := elem
		if fields != nil {
			if t, ok = fields[name]; !ok {
				return unknownField(at, name, fields)
			}
		} else if err := w.text(at, name); err != nil {
			return err
		}
		if path == "" {
			w.top = append(w.top, span{name: name, start: w.dec.InputOffset()})
		}
		if err := w.value(t, at); err != nil {
			return err
		}
		if path == "" {
			w.top[len(w.top)-1].end = w.dec.InputOffset()
		}
	}
	_, err := w.token(path)
	return err
}

func unknownField(path, name string, fields map[string]reflect.Type) error {
	e := kind.Errorf(kind.Invalid, "unknown field").WithField(path)
	for known := range fields {
		if strings.EqualFold(strings.ReplaceAll(known, "_", ""), strings.ReplaceAll(name, "_", "")) {
			return e.WithHint("did you mean %s?", known)
		}
	}
	return e.WithHint("GET /v1/openapi.yaml describes every field")
}

func (w *walker) array(path string, elem reflect.Type) error {
	for i := 0; w.dec.More(); i++ {
		if err := w.value(elem, fmt.Sprintf("%s[%d]", path, i)); err != nil {
			return err
		}
	}
	_, err := w.token(path)
	return err
}

func number(path string, n json.Number, t reflect.Type) error {
	var err error
	switch t.Kind() {
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		_, err = strconv.ParseInt(n.String(), 10, t.Bits())
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		_, err = strconv.ParseUint(n.String(), 10, t.Bits())
	case reflect.Float32, reflect.Float64:
		_, err = strconv.ParseFloat(n.String(), t.Bits())
	default:
		return invalid(path, "%.40s is a number; want %s", n, nameOf(t))
	}
	if err != nil {
		return invalid(path, "%.40s; want %s", n, nameOf(t))
	}
	return nil
}

func isBytes(t reflect.Type) bool {
	return t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Uint8
}

func nameOf(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Struct, reflect.Map:
		return "an object"
	case reflect.Slice, reflect.Array:
		if isBytes(t) {
			return "text in base64"
		}
		return "a list"
	case reflect.String:
		return "text"
	case reflect.Bool:
		return "true or false"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Uint:
		return fmt.Sprintf("a whole number from 0 to %d", uint64(1)<<(t.Bits()-1)-1+uint64(1)<<(t.Bits()-1))
	default:
		return "a whole number"
	}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// fieldsOf returns the JSON fields of a struct, those of embedded structs
// included.
func fieldsOf(t reflect.Type) map[string]reflect.Type {
	out := map[string]reflect.Type{}
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.IsExported() && name != "" && name != "-" {
			out[name] = f.Type
		}
	}
	return out
}
