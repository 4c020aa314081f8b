// Command missing prints the Debian packages that building the template base
// and running the tests need and this machine does not have.
package main

import (
	"fmt"

	"bivy/internal/doctor"
	"bivy/internal/template"
)

func main() {
	for _, name := range template.BasePackages() {
		if !doctor.Installed(name) {
			fmt.Println(name)
		}
	}
}
