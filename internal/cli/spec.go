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

// maxSpecFile bounds what is read of a spec.
const maxSpecFile = 1 << 20

// specFlags are what run, create and shell share: a spec file, and flags that
// win over it.
type specFlags struct {
	file, template, cpu, memory, disk, timeout, user, workdir, hostname, onBehalfOf, trigger string
	pids                                                                                     int64
	env, labels                                                                              []string
}

func (s *specFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&s.file, "spec", "", "YAML file with the session's spec; flags win over it")
	f.StringVar(&s.template, "template", "", "template to start from (default base)")
	f.StringVar(&s.cpu, "cpu", "", "cores, e.g. 2 or 0.5")
	f.StringVar(&s.memory, "memory", "", "memory limit, e.g. 512M or 2G")
	f.StringVar(&s.disk, "disk", "", "limit of the writable layer, e.g. 1G")
	f.Int64Var(&s.pids, "pids", 0, "limit of threads on the host")
	f.StringVar(&s.timeout, "timeout", "", "life of the session, e.g. 90s or 5m")
	f.StringArrayVarP(&s.env, "env", "e", nil, "environment variable KEY=VALUE, or KEY to pass one on; may be repeated")
	f.StringVar(&s.user, "user", "", "user that commands run as")
	f.StringVar(&s.workdir, "workdir", "", "directory that commands start in")
	f.StringVar(&s.hostname, "hostname", "", "host name inside")
	f.StringArrayVar(&s.labels, "label", nil, "label KEY=VALUE; may be repeated")
	f.StringVar(&s.onBehalfOf, "on-behalf-of", "", "whom this is done for; kept in the record")
	f.StringVar(&s.trigger, "trigger", "", "what set this off; kept in the record")
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

// parseSpec reads and checks a spec, and does not fill defaults.
func parseSpec(data []byte) (session.Spec, error) {
	var s session.Spec
	if err := config.Decode(data, &s); err != nil {
		return s, err
	}
	if s.Version == 0 {
		return s, kind.Errorf(kind.Invalid, "missing").WithField("version").
			WithHint("begin the file with version: %d", session.SpecVersion)
	}
	return s, s.WithDefaults().Validate()
}

// readSpec reads a spec file strictly: an error names the line.
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
