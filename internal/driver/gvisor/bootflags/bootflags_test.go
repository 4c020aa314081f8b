package bootflags

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestApply(t *testing.T) {
	dir := t.TempDir()
	args := []string{"runsc-sandbox", "--root=/r", "boot", "--bundle=" + dir, "--total-memory", "99", "--cpu-num=7", "--setup-root", "id-1"}
	got, err := Apply(args)
	if err != nil || !cmp.Equal(got, args) {
		t.Errorf("without a file: %v, %v", got, err)
	}
	if err := Write(dir, []string{"--total-memory=5", "--cpu-num=2"}); err != nil {
		t.Fatal(err)
	}
	got, err = Apply(args)
	want := []string{"runsc-sandbox", "--root=/r", "boot", "--total-memory=5", "--cpu-num=2", "--bundle=" + dir, "--setup-root", "id-1"}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("with a file: %v\n%s", err, diff)
	}
}
