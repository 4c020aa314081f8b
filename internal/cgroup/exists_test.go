package cgroup

import (
	"os"
	"slices"
)

// Exists reports whether any directory of the group exists.
func (g *Group) Exists() bool {
	return slices.ContainsFunc(g.allDirs(), func(d string) bool {
		_, err := os.Lstat(d)
		return err == nil
	})
}
