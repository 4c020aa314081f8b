// Command verifier is the verifier of the build that introduced version 1 of
// the record. The packages under internal are copies from that build; nothing
// here is changed when bivy is.
//
//	verifier session KEYS EXPORT
//	verifier system KEYS EXPORT
package main

import (
	"fmt"
	"os"

	"bivy/internal/audit"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: verifier session|system KEYS EXPORT")
		os.Exit(2)
	}
	report, err := verify(os.Args[1], os.Args[2], os.Args[3])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(report)
}

func verify(what, keyFile, export string) (fmt.Stringer, error) {
	text, err := os.ReadFile(keyFile)
	if err != nil {
		return nil, err
	}
	keys, err := audit.ParsePublicKeys(text)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(export)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	switch what {
	case "session":
		return audit.Verify(f, keys, audit.VerifyOptions{AllowErased: true})
	case "system":
		return audit.VerifySystem(f, keys, audit.VerifyOptions{AllowErased: true})
	}
	return nil, fmt.Errorf("unexpected argument %q", what)
}
