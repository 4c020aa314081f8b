package session

import "testing"

func TestWithoutEnvValues(t *testing.T) {
	s := Spec{Env: map[string]string{"TOKEN": "plaintext"}}
	if got := s.WithoutEnvValues().Env["TOKEN"]; got != "" {
		t.Errorf("value %q is still there", got)
	}
	if s.Env["TOKEN"] != "plaintext" {
		t.Error("the spec itself was changed")
	}
}
