// Package debian makes a root file system from the files of Debian packages as they
// are installed on this host. It contains nothing else of the host: no accounts,
// keys, host names, local configuration or state.
package debian

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"

	"bivy/internal/kind"
)

// Limits of the size of dpkg's database.
const (
	maxStatusBytes = 256 << 20
	maxListBytes   = 64 << 20
	maxLineBytes   = 1 << 20
)

const (
	statusFile = "var/lib/dpkg/status"
	infoDir    = "var/lib/dpkg/info"
)

// architecture is the architecture of images; packages for "all" are used too.
const architecture = "amd64"

// pkg is an installed package.
type pkg struct {
	name      string
	version   string
	arch      string
	depends   [][]string        // groups of alternatives, without versions, which dpkg has checked
	provides  []string          // virtual packages
	conffiles map[string]string // MD5 of the packaged version, by path
	paragraph string            // its text in dpkg's status file
}

// database holds the packages that dpkg lists as installed.
type database struct {
	byName    map[string]*pkg
	providers map[string][]*pkg // of virtual packages, sorted by name
}

// readDatabase reads dpkg's status file below root.
func readDatabase(root *os.Root) (*database, error) {
	f, err := root.Open(statusFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, kind.Errorf(kind.Invalid, "this host has no dpkg database (/%s)", statusFile).
			WithHint("host packages need Debian or a distribution made from it; use from.image, from.tar or from.directory here")
	}
	if err != nil {
		return nil, fmt.Errorf("dpkg: %w", err)
	}
	defer f.Close()
	db, err := parseStatus(f)
	if err != nil {
		return nil, fmt.Errorf("dpkg: /%s: %w", statusFile, err)
	}
	return db, nil
}

func parseStatus(r io.Reader) (*database, error) {
	db := &database{byName: map[string]*pkg{}, providers: map[string][]*pkg{}}
	limited := &io.LimitedReader{R: r, N: maxStatusBytes + 1}
	sc := bufio.NewScanner(limited)
	sc.Buffer(make([]byte, 64<<10), maxLineBytes)
	var lines []string
	flush := func() {
		if len(lines) > 0 {
			db.add(parseParagraph(lines))
			lines = lines[:0]
		}
	}
	for sc.Scan() {
		if line := sc.Text(); strings.TrimSpace(line) != "" {
			lines = append(lines, line)
		} else {
			flush()
		}
	}
	flush()
	if err := sc.Err(); err != nil {
		return nil, err
	}
	if limited.N == 0 {
		return nil, fmt.Errorf("exceeds %d bytes", maxStatusBytes)
	}
	for _, ps := range db.providers {
		slices.SortFunc(ps, func(a, b *pkg) int { return strings.Compare(a.name, b.name) })
	}
	return db, nil
}

// parseParagraph returns nil for a package that is not installed here.
func parseParagraph(lines []string) *pkg {
	fields := map[string]string{}
	last := ""
	for _, l := range lines {
		if l[0] == ' ' || l[0] == '\t' {
			fields[last] += "\n" + l
			continue
		}
		k, v, ok := strings.Cut(l, ":")
		if !ok {
			continue
		}
		last = strings.ToLower(k)
		fields[last] = strings.TrimSpace(v)
	}
	status := strings.Fields(fields["status"])
	if len(status) != 3 || fields["package"] == "" {
		return nil
	}
	switch status[2] {
	case "installed", "triggers-awaited", "triggers-pending":
	default:
		return nil
	}
	if a := fields["architecture"]; a != architecture && a != "all" {
		return nil
	}
	p := &pkg{
		name:      fields["package"],
		version:   fields["version"],
		arch:      fields["architecture"],
		depends:   append(parseRelations(fields["pre-depends"]), parseRelations(fields["depends"])...),
		conffiles: map[string]string{},
		paragraph: strings.Join(lines, "\n"),
	}
	for _, group := range parseRelations(fields["provides"]) {
		p.provides = append(p.provides, group...)
	}
	for l := range strings.SplitSeq(fields["conffiles"], "\n") {
		// " /path md5 [obsolete|remove-on-upgrade]"
		if f := strings.Fields(l); len(f) == 2 {
			p.conffiles[f[0]] = f[1]
		}
	}
	return p
}

// relation matches one package of a dependency, without its version and
// architecture.
var relation = regexp.MustCompile(`^\s*([a-z0-9][a-z0-9+.-]*)`)

func parseRelations(s string) [][]string {
	var out [][]string
	for group := range strings.SplitSeq(s, ",") {
		var names []string
		for alt := range strings.SplitSeq(group, "|") {
			if m := relation.FindStringSubmatch(alt); m != nil {
				names = append(names, m[1])
			}
		}
		if len(names) > 0 {
			out = append(out, names)
		}
	}
	return out
}

func (db *database) add(p *pkg) {
	if p == nil {
		return
	}
	db.byName[p.name] = p
	for _, v := range p.provides {
		db.providers[v] = append(db.providers[v], p)
	}
}

// closure returns the named packages and all their dependencies, sorted by name.
// The error for packages that are not installed lists all of them and the command
// that installs them.
func (db *database) closure(names []string) ([]*pkg, error) {
	var missing []string
	chosen := map[string]*pkg{}
	var queue []*pkg
	take := func(p *pkg) {
		if chosen[p.name] == nil {
			chosen[p.name] = p
			queue = append(queue, p)
		}
	}
	for _, n := range names {
		if p := db.byName[n]; p != nil {
			take(p)
		} else if !slices.Contains(missing, n) {
			missing = append(missing, n)
		}
	}
	if len(missing) > 0 {
		return nil, kind.Errorf(kind.NotFound, "packages are not installed on this host: %s", strings.Join(missing, " ")).
			WithField("from.host_packages.packages").
			WithHint("apt-get install --no-install-recommends -y %s", strings.Join(missing, " "))
	}
	for len(queue) > 0 {
		p := queue[0]
		queue = queue[1:]
		for _, group := range p.depends {
			d := db.satisfy(group, chosen)
			if d == nil {
				return nil, kind.Errorf(kind.Invalid, "package %s depends on %s, which is not installed on this host", p.name, strings.Join(group, " or ")).
					WithField("from.host_packages.packages").WithHint("apt-get install -f")
			}
			take(d)
		}
	}
	out := make([]*pkg, 0, len(chosen))
	for _, p := range chosen {
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b *pkg) int { return strings.Compare(a.name, b.name) })
	return out, nil
}

// satisfy returns an installed package for a dependency: one that is chosen already,
// otherwise the first real package, otherwise the first that provides it.
func (db *database) satisfy(group []string, chosen map[string]*pkg) *pkg {
	var first *pkg
	for _, n := range group {
		if p := chosen[n]; p != nil {
			return p
		}
		for _, p := range db.providers[n] {
			if chosen[p.name] != nil {
				return p
			}
		}
		if p := db.byName[n]; p != nil && first == nil {
			first = p
		}
	}
	if first != nil {
		return first
	}
	for _, n := range group {
		if ps := db.providers[n]; len(ps) > 0 {
			return ps[0]
		}
	}
	return nil
}

// files returns the paths of package p, as dpkg lists them.
func (p *pkg) files(root *os.Root) ([]string, error) {
	f, err := root.Open(infoDir + "/" + p.name + ":" + p.arch + ".list")
	if errors.Is(err, fs.ErrNotExist) {
		f, err = root.Open(infoDir + "/" + p.name + ".list")
	}
	if err != nil {
		return nil, fmt.Errorf("dpkg: files of %s: %w", p.name, err)
	}
	defer f.Close()
	limited := &io.LimitedReader{R: f, N: maxListBytes + 1}
	sc := bufio.NewScanner(limited)
	sc.Buffer(make([]byte, 64<<10), maxLineBytes)
	var out []string
	for sc.Scan() {
		if l := sc.Text(); strings.HasPrefix(l, "/") && l != "/." {
			out = append(out, l)
		}
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("dpkg: files of %s: %w", p.name, err)
	}
	if limited.N == 0 {
		return nil, fmt.Errorf("dpkg: files of %s: exceeds %d bytes", p.name, maxListBytes)
	}
	return out, nil
}
