package audit

import "bivy/internal/session"

// Next makes the event that follows h from e: Prepare and Chain in one.
func Next(h Head, at session.Fence, e Entry, m Moment) (Stored, error) {
	d, err := Prepare(e)
	if err != nil {
		return Stored{}, err
	}
	return d.Chain(h, at, m)
}
