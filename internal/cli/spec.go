package cli

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"bivy/client"
	"bivy/internal/config"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// maxSpecFile is the largest spec or template file, in bytes.
const maxSpecFile = 1 << 20

// specFlags are the flags of run, create and shell that make a spec: a file, and
// flags that override it.
type specFlags struct {
	file, template, cpu, memory, disk, timeout, user, workdir, hostname, onBehalfOf, trigger string
	pids                                                                                     int64
	env, labels                                                                              []string
}

func (s *specFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	d := session.Spec{}.WithDefaults()
	or := func(format string, v any) string { return fmt.Sprintf(" (default "+format+")", v) }
	f.StringVar(&s.file, "spec", "", "YAML `FILE` with the spec of the session; flags override it")
	f.StringVar(&s.template, "template", "", "`NAME` or digest of the template to start from"+or("%s", d.Template))
	f.StringVar(&s.cpu, "cpu", "", "limit of CPU time in `CORES`, e.g. 2 or 0.5"+or("%g", float64(d.Resources.CPUMillis)/1000))
	f.StringVar(&s.memory, "memory", "", "limit of memory, a `SIZE` such as 512M or 2G"+or("%dM", d.Resources.MemoryMiB))
	f.StringVar(&s.disk, "disk", "", "limit of the writable layer, a `SIZE` such as 1G"+or("%dM", d.Resources.DiskMiB))
	f.Int64Var(&s.pids, "pids", 0, "limit of threads on the host, a `NUMBER`"+or("%d", d.Resources.PIDs))
	f.StringVar(&s.timeout, "timeout", "", "`DURATION` after which the session ends, e.g. 90s or 10m"+or("%s", formatDuration(d.Timeout.Duration())))
	f.StringArrayVarP(&s.env, "env", "e", nil, "environment variable `KEY=VALUE`, or KEY for the value it has here; may be repeated")
	f.StringVar(&s.user, "user", "", "`USER` that commands run as (default the template's)")
	f.StringVar(&s.workdir, "workdir", "", "`DIR` that commands start in (default the template's, else the user's home)")
	f.StringVar(&s.hostname, "hostname", "", "host `NAME` inside the session"+or("%s", d.Hostname))
	f.StringArrayVar(&s.labels, "label", nil, "label `KEY=VALUE`; may be repeated")
	f.StringVar(&s.onBehalfOf, "on-behalf-of", "", "`WHO` the session is created for; written to the record")
	f.StringVar(&s.trigger, "trigger", "", "`WHAT` caused the session to be created; written to the record")
}

func (s *specFlags) request() (client.CreateSession, error) {
	out := client.CreateSession{OnBehalfOf: s.onBehalfOf, Trigger: s.trigger}
	if s.file != "" {
		spec, err := readSpec(s.file)
		if err != nil {
			return out, err
		}
		out.Spec = spec
	}
	for _, f := range []struct {
		from string
		to   *string
	}{{s.template, &out.Template}, {s.user, &out.User}, {s.workdir, &out.Workdir}, {s.hostname, &out.Hostname}} {
		if f.from != "" {
			*f.to = f.from
		}
	}
	for _, f := range []struct {
		from  string
		to    *int64
		parse func(string) (int64, error)
	}{
		{s.cpu, &out.Resources.CPUMillis, parseCPU},
		{s.memory, &out.Resources.MemoryMiB, func(v string) (int64, error) { return parseMiB("--memory", v) }},
		{s.disk, &out.Resources.DiskMiB, func(v string) (int64, error) { return parseMiB("--disk", v) }},
		{s.timeout, &out.TimeoutSeconds, func(v string) (int64, error) { return parseSeconds("--timeout", v) }},
	} {
		if f.from == "" {
			continue
		}
		n, err := f.parse(f.from)
		if err != nil {
			return out, err
		}
		*f.to = n
	}
	if s.pids != 0 {
		out.Resources.PIDs = s.pids
	}
	for _, f := range []struct {
		flag   string
		texts  []string
		lookup func(string) (string, bool)
		to     *map[string]string
	}{{"--env", s.env, config.Variable, &out.Env}, {"--label", s.labels, nil, &out.Labels}} {
		pairs, err := parsePairs(f.flag, f.texts, f.lookup)
		if err != nil {
			return out, err
		}
		for k, v := range pairs {
			if *f.to == nil {
				*f.to = map[string]string{}
			}
			(*f.to)[k] = v
		}
	}
	return out, nil
}

// parseSpec reads and checks a spec. It does not fill in defaults.
func parseSpec(data []byte) (session.Spec, error) {
	var s session.Spec
	if err := config.Decode(data, &s); err != nil {
		return s, err
	}
	if s.Version == 0 {
		return s, kind.Errorf(kind.Invalid, "missing").WithField("version").
			WithHint("start the file with: version: %d", session.SpecVersion)
	}
	return s, s.WithDefaults().Validate()
}

// readSpec reads a spec file. An error names the line.
func readSpec(path string) (client.Spec, error) {
	f, err := os.Open(path)
	if err != nil {
		return client.Spec{}, kind.Errorf(kind.Invalid, "%w", err).WithField("--spec")
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxSpecFile+1))
	if err != nil {
		return client.Spec{}, kind.Errorf(kind.Invalid, "%w", err).WithField("--spec")
	}
	if len(data) > maxSpecFile {
		return client.Spec{}, kind.Errorf(kind.Invalid, "%s is larger than %d bytes", path, maxSpecFile).WithField("--spec")
	}
	s, err := parseSpec(data)
	if err != nil {
		return client.Spec{}, fmt.Errorf("%s: %w", path, err)
	}
	return client.Spec{
		Version: s.Version, Template: s.Template, TimeoutSeconds: int64(s.Timeout), Env: s.Env, User: s.User,
		Workdir: s.Workdir, Hostname: s.Hostname, Labels: s.Labels,
		Resources: client.Resources{CPUMillis: s.Resources.CPUMillis, MemoryMiB: s.Resources.MemoryMiB,
			DiskMiB: s.Resources.DiskMiB, PIDs: s.Resources.PIDs},
	}, nil
}
