package poll

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestDelaysGrow(t *testing.T) {
	for name, tt := range map[string]struct {
		delays Delays
		want   []time.Duration
	}{
		"growing":          {Delays{First: 1, Max: 5}, []time.Duration{0, 1, 3, 7, 12, 17}},
		"constant":         {Every(2), []time.Duration{0, 2, 4, 6, 8, 10}},
		"Max below First":  {Delays{First: 3, Max: 1}, []time.Duration{0, 3, 6, 9, 12, 15}},
		"no delay between": {Delays{}, []time.Duration{0, 0, 0, 0, 0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				var at []time.Duration
				err := Until(t.Context(), tt.delays, func() (bool, error) {
					at = append(at, time.Since(began))
					return len(at) == len(tt.want), errors.New("not yet")
				})
				if err == nil || err.Error() != "not yet" {
					t.Errorf("%v; want the error of the last try as it is", err)
				}
				if diff := cmp.Diff(tt.want, at); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

func TestUntilDone(t *testing.T) {
	if err := Until(t.Context(), Every(time.Hour), func() (bool, error) { return true, nil }); err != nil {
		t.Error(err)
	}
}

func TestContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		why := errors.New("not ready")
		tries, began := 0, time.Now()
		err := Until(ctx, Every(4*time.Second), func() (bool, error) { tries++; return false, why })
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, why) {
			t.Errorf("%v; want the deadline and the last error", err)
		}
		if tries != 3 || time.Since(began) != 10*time.Second {
			t.Errorf("%d tries in %s", tries, time.Since(began))
		}
	})
	cause := errors.New("shutting down")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	tries := 0
	if err := Until(ctx, Delays{}, func() (bool, error) { tries++; return false, nil }); !errors.Is(err, cause) || tries != 1 {
		t.Errorf("%v after %d tries; want one try and the cause", err, tries)
	}
	if err := Sleep(ctx, 0); !errors.Is(err, cause) {
		t.Errorf("%v; want the cause", err)
	}
}

func TestSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		if err := Sleep(t.Context(), time.Minute); err != nil || time.Since(began) != time.Minute {
			t.Errorf("%v after %s", err, time.Since(began))
		}
	})
}
