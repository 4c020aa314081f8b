package config

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"bivy/internal/kind"
)

// Decode reads one YAML document into v, a pointer to a struct whose fields
// have yaml tags (or json tags, where it has no yaml ones). It refuses unknown
// and duplicate fields, values of another type, null, aliases, merge keys, tags
// and a second document; the error names the line and the field. An empty
// document leaves v as it is.
func Decode(data []byte, v any) error {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	if err := dec.Decode(&doc); err != nil {
		if errors.Is(err, io.EOF) {
			return nil
		}
		return kind.Errorf(kind.Invalid, "%s", strings.TrimPrefix(err.Error(), "yaml: "))
	}
	var second yaml.Node
	if err := dec.Decode(&second); !errors.Is(err, io.EOF) {
		return kind.Errorf(kind.Invalid, "line %d: unexpected second document", second.Line)
	}
	root := doc.Content[0]
	if root.Kind == yaml.ScalarNode && root.Tag == "!!null" {
		return nil
	}
	return decode(root, reflect.ValueOf(v).Elem(), "")
}

func bad(n *yaml.Node, path, format string, args ...any) error {
	args = append([]any{n.Line}, args...)
	return kind.Errorf(kind.Invalid, "line %d: "+format, args...).WithField(path)
}

func decode(n *yaml.Node, v reflect.Value, path string) error {
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		return bad(n, path, "anchors and aliases are not supported")
	}
	if n.Style&yaml.TaggedStyle != 0 {
		return bad(n, path, "tags such as %s are not supported", n.Tag)
	}
	if v.Kind() == reflect.Pointer {
		v.Set(reflect.New(v.Type().Elem()))
		return decode(n, v.Elem(), path)
	}
	switch v.Kind() {
	case reflect.Struct:
		return decodeStruct(n, v, path)
	case reflect.Map:
		return decodeMap(n, v, path)
	case reflect.Slice:
		if n.Kind != yaml.SequenceNode {
			return bad(n, path, "must be a list")
		}
		out := reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content))
		for i, item := range n.Content {
			if err := decode(item, out.Index(i), path+"["+strconv.Itoa(i)+"]"); err != nil {
				return err
			}
		}
		v.Set(out)
		return nil
	default:
		return decodeScalar(n, v, path)
	}
}

func decodeScalar(n *yaml.Node, v reflect.Value, path string) error {
	if n.Kind != yaml.ScalarNode {
		return bad(n, path, "must be a single value")
	}
	if n.Tag == "!!null" {
		return bad(n, path, "the value is missing; omit the field to use its default")
	}
	switch v.Kind() {
	case reflect.String:
		if n.Tag != "!!str" {
			return bad(n, path, "%.40s is not a string; put it in quotes", n.Value)
		}
		v.SetString(n.Value)
	case reflect.Bool:
		if n.Tag != "!!bool" {
			return bad(n, path, "%.40q; want true or false", n.Value)
		}
		v.SetBool(strings.EqualFold(n.Value, "true"))
	case reflect.Int, reflect.Int64:
		i, err := strconv.ParseInt(n.Value, 10, v.Type().Bits())
		if n.Tag != "!!int" || err != nil {
			return bad(n, path, "%.40q; want a whole number", n.Value)
		}
		v.SetInt(i)
	default:
		return bad(n, path, "cannot be set in a file")
	}
	return nil
}

func decodeMap(n *yaml.Node, v reflect.Value, path string) error {
	if n.Kind != yaml.MappingNode {
		return bad(n, path, "must be a map of names to values")
	}
	out := reflect.MakeMapWithSize(v.Type(), len(n.Content)/2)
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if key.Kind != yaml.ScalarNode || key.Tag != "!!str" {
			return bad(key, path, "%.40q is not a string; put it in quotes", key.Value)
		}
		at := join(path, key.Value)
		k := reflect.ValueOf(key.Value)
		if out.MapIndex(k).IsValid() {
			return bad(key, at, "given twice")
		}
		elem := reflect.New(v.Type().Elem()).Elem()
		if err := decode(value, elem, at); err != nil {
			return err
		}
		out.SetMapIndex(k, elem)
	}
	v.Set(out)
	return nil
}

func decodeStruct(n *yaml.Node, v reflect.Value, path string) error {
	if n.Kind != yaml.MappingNode {
		return bad(n, path, "must be fields of the form name: value")
	}
	seen := map[string]bool{}
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		at := join(path, key.Value)
		index := fieldIndex(v.Type(), key.Value)
		switch {
		case key.Kind != yaml.ScalarNode:
			return bad(key, path, "a list or map cannot be a field's name")
		case index == nil:
			return kind.Errorf(kind.Invalid, "line %d: unknown field", key.Line).WithField(at).
				WithHint("fields: %s", strings.Join(fieldNames(v.Type()), ", "))
		case seen[key.Value]:
			return bad(key, at, "given twice")
		}
		seen[key.Value] = true
		if err := decode(value, v.FieldByIndex(index), at); err != nil {
			return err
		}
	}
	return nil
}

func tagName(f reflect.StructField) string {
	tag, ok := f.Tag.Lookup("yaml")
	if !ok {
		tag = f.Tag.Get("json")
	}
	name, _, _ := strings.Cut(tag, ",")
	if name == "-" {
		return ""
	}
	return name
}

func fieldIndex(t reflect.Type, name string) []int {
	for _, f := range reflect.VisibleFields(t) {
		if f.IsExported() && name != "" && tagName(f) == name {
			return f.Index
		}
	}
	return nil
}

func fieldNames(t reflect.Type) []string {
	var names []string
	for _, f := range reflect.VisibleFields(t) {
		if f.IsExported() && tagName(f) != "" {
			names = append(names, tagName(f))
		}
	}
	slices.Sort(names)
	return names
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}
