package bench

import (
	"context"
	"os"
	"os/exec"
	"time"

	"bivy/client"
)

// Names of figures that budgets are of.
const (
	coldName   = "create to first output"
	bootDisk   = 1025 // MiB; a snapshot holds the default size, any other boots
	runscName  = "runsc run"
	runcName   = "runc run"
	dockerName = "docker run"
	engineName = "docker API"
)

// command is what everybody runs.
func command() []string { return []string{"/bin/echo", "hi"} }

// cold measures from before the request for a sandbox to the first byte of
// output of a command in it.
func cold(ctx context.Context, b *bench) ([]Figure, error) {
	s, err := b.serve(ctx)
	if err != nil {
		return nil, err
	}
	phases := map[string]*series{}
	note := func(session *client.Session) {
		for _, p := range session.Timing {
			name := "create: " + p.Name
			if phases[name] == nil {
				phases[name] = &series{}
			}
			phases[name].took(p.Took())
		}
	}
	restore := &contestant{name: "bivy", cpu: s.cpu, do: func(ctx context.Context) (time.Duration, time.Duration, error) {
		return s.life(ctx, client.CreateSession{}, command(), note)
	}}
	var booted client.CreateSession
	booted.Resources.DiskMiB = bootDisk
	boot := &contestant{name: "bivy, booted", cpu: s.cpu, do: func(ctx context.Context) (time.Duration, time.Duration, error) {
		return s.life(ctx, booted, command(), nil)
	}}
	commandLine := &contestant{name: "bivy run", cpu: func() time.Duration { return s.cpu() + b.used("cli") }, do: b.commandLine(s)}
	others, done, err := b.comparators(ctx, s)
	defer done()
	if err != nil {
		return nil, err
	}
	b.begin()
	if err := b.rounds(ctx, samples, append([]*contestant{restore, boot, commandLine}, others...)...); err != nil {
		return nil, err
	}
	var figures []Figure
	mine := restore.first.figure(coldName, "ms")
	if len(others) == 0 {
		figures = append(figures, mine)
	}
	for _, o := range others {
		figures = append(figures, mine.against(o.name, &o.first))
	}
	for _, c := range append([]*contestant{boot, commandLine}, others...) {
		figures = append(figures, c.first.figure(coldName+": "+c.name, "ms"))
	}
	for _, c := range append([]*contestant{restore, boot, commandLine}, others...) {
		figures = append(figures, c.gone.figure("create to nothing left: "+c.name, "ms"))
	}
	for _, name := range sorted(phases) {
		figures = append(figures, phases[name].figure(name, "ms"))
	}
	return figures, nil
}

// used is what a group of ours has used so far.
func (b *bench) used(name string) time.Duration {
	g, err := b.groups.group(name)
	if err != nil {
		return 0
	}
	return used(g)
}

// commandLine runs "bivy run" against the server: what a process of its own
// adds.
func (b *bench) commandLine(s *server) func(ctx context.Context) (first, gone time.Duration, err error) {
	return func(ctx context.Context) (time.Duration, time.Duration, error) {
		exe, err := os.Executable()
		if err != nil {
			return 0, 0, err
		}
		args := append([]string{"--server", s.url, "run", "--"}, command()...)
		cmd := exec.CommandContext(ctx, exe, args...) //nolint:gosec // this program
		cmd.Env = append(os.Environ(), "BIVY_API_KEY="+s.key)
		return b.spawn("cli", cmd)
	}
}
