package api

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"bivy/client"
)

// document is the part of OpenAPI that is held against the code.
type document struct {
	Paths      map[string]map[string]any
	Components struct {
		Schemas    map[string]schema
		Parameters map[string]struct {
			Name, In string
		}
	}
}

type schema struct {
	Ref        string `yaml:"$ref"`
	Type       string
	Required   []string
	Properties map[string]schema
	Items      *schema
	Values     *schema  `yaml:"additionalProperties"`
	AllOf      []schema `yaml:"allOf"`
	Enum       []string
}

// operation is one method of one path.
type operation struct {
	OperationID string `yaml:"operationId"`
	Summary     string
	Security    *[]map[string][]string
	Parameters  []schema
	RequestBody struct {
		Content map[string]struct{ Schema schema }
	} `yaml:"requestBody"`
	Responses map[string]struct {
		Content map[string]struct{ Schema schema }
	}
}

func readDocument(t *testing.T) (document, map[string]operation) {
	t.Helper()
	var doc document
	if err := yaml.Unmarshal(openAPIDocument, &doc); err != nil {
		t.Fatal(err)
	}
	ops := map[string]operation{}
	for path, item := range doc.Paths {
		for method, v := range item {
			if method == "parameters" {
				continue
			}
			b, err := yaml.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			var op operation
			if err := yaml.Unmarshal(b, &op); err != nil {
				t.Fatalf("%s %s: %v", method, path, err)
			}
			ops[strings.ToUpper(method)+" "+path] = op
		}
	}
	return doc, ops
}

func refName(s string) string { return s[strings.LastIndexByte(s, '/')+1:] }

func TestDocumentHasEveryRoute(t *testing.T) {
	doc, ops := readDocument(t)
	seen := map[string]bool{}
	ids := map[string]bool{}
	for _, r := range table() {
		name := r.method + " " + strings.ReplaceAll(r.pattern, "...}", "}")
		seen[name] = true
		op, ok := ops[name]
		if !ok {
			t.Errorf("%s is not in the document", name)
			continue
		}
		if op.OperationID == "" || ids[op.OperationID] || op.Summary == "" {
			t.Errorf("%s: operationId %q is empty or not its own, or there is no summary", name, op.OperationID)
		}
		ids[op.OperationID] = true
		if open := op.Security != nil && len(*op.Security) == 0; open != (r.public != "") {
			t.Errorf("%s: the document says open=%t, the route says %q", name, open, r.public)
		}
		var query []string
		repeatable := false
		for _, p := range op.Parameters {
			d, ok := doc.Components.Parameters[refName(p.Ref)]
			if !ok {
				t.Errorf("%s: parameter %s is not in the document", name, p.Ref)
			}
			if d.In == "query" {
				query = append(query, d.Name)
			}
			repeatable = repeatable || d.Name == idempotencyHeader
		}
		var want []string
		for _, q := range r.query {
			want = append(want, strings.TrimSuffix(q, "*"))
		}
		slices.Sort(query)
		slices.Sort(want)
		if !slices.Equal(query, want) || repeatable != r.repeatable {
			t.Errorf("%s: the document takes %v (idempotency %t), the route %v (%t)", name, query, repeatable, want, r.repeatable)
		}
		if _, ok := op.Responses["default"]; !ok {
			t.Errorf("%s: no default answer", name)
		}
	}
	for name := range ops {
		if !seen[name] {
			t.Errorf("the document has %s, the server has not", name)
		}
	}
}

// wireTypes are all there are on the wire.
func wireTypes() []any {
	return []any{
		client.Spec{}, client.Resources{}, client.CreateSession{}, client.Principal{}, client.SessionInfo{}, client.CreatedSession{}, client.Phase{},
		client.Progress{}, client.CreateUpdate{}, client.SetTimeout{}, client.Command{}, client.Size{}, client.CommandInfo{}, client.Started{},
		client.Exit{}, client.SendSignal{}, client.CommandEvent{}, client.FileInfo{}, client.Stats{}, client.Event{}, client.Decision{}, client.EventUpdate{},
		client.Template{}, client.BuildTemplate{}, client.TemplateSource{}, client.HostPackages{}, client.OCIImage{}, client.RegistryCredentials{},
		client.OCIFile{}, client.PathSource{}, client.BuildUpdate{}, client.Key{}, client.CreateKey{}, client.CreatedKey{}, client.AuditKey{}, client.FormerKey{}, client.RotateAuditKey{}, client.ListedRecord{},
		client.Version{}, client.Health{}, client.Node{}, client.Fact{}, client.Error{},
		client.Page[client.SessionInfo]{}, client.Page[client.Event]{}, client.Page[client.CommandInfo]{}, client.Page[client.FileInfo]{},
		client.Page[client.Template]{}, client.Page[client.Key]{},
	}
}

func schemaName(t reflect.Type) string {
	if inner, ok := strings.CutPrefix(t.Name(), "Page["); ok {
		return "PageOf" + strings.TrimSuffix(inner[strings.LastIndexByte(inner, '.')+1:], "]")
	}
	return t.Name()
}

// flatten returns a schema's own properties and those of what it is made of.
func flatten(doc document, s schema) (map[string]schema, []string) {
	props, required := maps.Clone(s.Properties), slices.Clone(s.Required)
	if props == nil {
		props = map[string]schema{}
	}
	for _, part := range s.AllOf {
		p, r := flatten(doc, doc.Components.Schemas[refName(part.Ref)])
		maps.Copy(props, p)
		required = append(required, r...)
	}
	return props, required
}

func TestDocumentHasEveryField(t *testing.T) {
	doc, _ := readDocument(t)
	known := map[string]bool{}
	for _, v := range wireTypes() {
		typ := reflect.TypeOf(v)
		name := schemaName(typ)
		known[name] = true
		s, ok := doc.Components.Schemas[name]
		if !ok {
			t.Errorf("the document has no schema %s", name)
			continue
		}
		props, required := flatten(doc, s)
		for _, f := range reflect.VisibleFields(typ) {
			tag, options, _ := strings.Cut(f.Tag.Get("json"), ",")
			if f.Anonymous || tag == "-" {
				continue
			}
			if tag == "" {
				t.Errorf("%s.%s has no name on the wire", name, f.Name)
			}
			p, ok := props[tag]
			if !ok {
				t.Errorf("schema %s has no %s", name, tag)
				continue
			}
			delete(props, tag)
			if want := wireKind(f.Type); p.Ref == "" && want != p.Type && want != "" || p.Ref != "" && doc.Components.Schemas[refName(p.Ref)].Type == "" {
				t.Errorf("schema %s: %s is %q (%s), in Go it is %s", name, tag, p.Type, p.Ref, f.Type)
			}
			if always := options == ""; always != slices.Contains(required, tag) {
				t.Errorf("schema %s: %s required=%t, but in Go it is always there: %t", name, tag, !always, always)
			}
		}
		for tag := range props {
			t.Errorf("schema %s has %s, the type has not", name, tag)
		}
	}
	for name, s := range doc.Components.Schemas {
		if !known[name] && len(s.Enum) == 0 {
			t.Errorf("schema %s is of no type", name)
		}
	}
}

func wireKind(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Pointer:
		return wireKind(t.Elem())
	case reflect.Struct:
		if t == reflect.TypeFor[time.Time]() {
			return "string"
		}
		return "object"
	case reflect.Map:
		return "object"
	case reflect.Slice:
		if t == reflect.TypeFor[json.RawMessage]() {
			return ""
		}
		if isBytes(t) {
			return "string"
		}
		return "array"
	case reflect.String:
		return "string"
	case reflect.Bool:
		return "boolean"
	case reflect.Float64:
		return "number"
	}
	return "integer"
}

// validate reports where a value is not what a schema says.
func (d document) validate(v any, s schema, at string) error {
	if s.Ref != "" {
		return d.validate(v, d.Components.Schemas[refName(s.Ref)], at)
	}
	switch v := v.(type) {
	case map[string]any:
		if s.Values != nil {
			for k, item := range v {
				if err := d.validate(item, *s.Values, at+"."+k); err != nil {
					return err
				}
			}
			return nil
		}
		props, required := flatten(d, s)
		for _, r := range required {
			if _, ok := v[r]; !ok {
				return fmt.Errorf("%s.%s is missing", at, r)
			}
		}
		if len(props) == 0 {
			return nil // any JSON
		}
		for k, item := range v {
			p, ok := props[k]
			if !ok {
				return fmt.Errorf("%s.%s is not in the document", at, k)
			}
			if err := d.validate(item, p, at+"."+k); err != nil {
				return err
			}
		}
	case []any:
		if s.Items == nil {
			return fmt.Errorf("%s is a list", at)
		}
		for i, item := range v {
			if err := d.validate(item, *s.Items, fmt.Sprintf("%s[%d]", at, i)); err != nil {
				return err
			}
		}
	case string:
		if s.Type != "string" || len(s.Enum) > 0 && !slices.Contains(s.Enum, v) {
			return fmt.Errorf("%s is %q, want %s %v", at, v, s.Type, s.Enum)
		}
	case float64:
		if s.Type != "number" && (s.Type != "integer" || v != float64(int64(v))) {
			return fmt.Errorf("%s is %v, want %s", at, v, s.Type)
		}
	case bool:
		if s.Type != "boolean" {
			return fmt.Errorf("%s is %t, want %s", at, v, s.Type)
		}
	case nil:
		return fmt.Errorf("%s is null", at)
	}
	return nil
}

// Validator checks answers against the document.
func Validator(t *testing.T) func(method, path string, status int, mediaType string, body []byte) error {
	doc, ops := readDocument(t)
	return func(method, path string, status int, mediaType string, body []byte) error {
		var v any
		if err := json.Unmarshal(body, &v); err != nil {
			return err
		}
		if status >= 400 && path != "/v1/health" {
			return doc.validate(v, doc.Components.Schemas["Error"], "error")
		}
		for name, op := range ops {
			m, pattern, _ := strings.Cut(name, " ")
			if m != method || !matches(pattern, path) {
				continue
			}
			c, ok := op.Responses[fmt.Sprint(status)].Content[mediaType]
			if !ok {
				return fmt.Errorf("%s does not answer %d with %s", name, status, mediaType)
			}
			return doc.validate(v, c.Schema, name)
		}
		return fmt.Errorf("no operation for %s %s", method, path)
	}
}

func matches(pattern, path string) bool {
	p, q := strings.Split(pattern, "/"), strings.Split(path, "/")
	if strings.HasSuffix(pattern, "{name}") && len(q) > len(p) {
		q = q[:len(p)]
	}
	if len(p) != len(q) {
		return false
	}
	for i := range p {
		if p[i] != q[i] && !strings.HasPrefix(p[i], "{") {
			return false
		}
	}
	return true
}
