package hostclock

import "testing"

func TestClocks(t *testing.T) {
	a, err := BootID()
	if err != nil || len(a) != 36 {
		t.Errorf("boot id %q, %v", a, err)
	}
	if b, err := BootID(); a != b || err != nil {
		t.Errorf("one boot, ids %q and %q, %v", a, b, err)
	}
	if x, y := Uptime(), Uptime(); x <= 0 || y < x {
		t.Errorf("uptime %s, then %s", x, y)
	}
}
