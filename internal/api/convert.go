package api

import (
	"strings"
	"time"
	"unicode/utf8"

	"bivy/client"
	"bivy/internal/audit"
	"bivy/internal/auth"
	"bivy/internal/driver"
	"bivy/internal/journal"
	"bivy/internal/session"
	"bivy/internal/template"
	"bivy/internal/workload"
)

func specIn(s client.Spec) session.Spec {
	return session.Spec{
		Version:  s.Version,
		Template: s.Template,
		Resources: session.Resources{
			CPUMillis: s.Resources.CPUMillis,
			MemoryMiB: s.Resources.MemoryMiB,
			DiskMiB:   s.Resources.DiskMiB,
			PIDs:      s.Resources.PIDs,
		},
		Timeout:  session.Seconds(s.TimeoutSeconds),
		Env:      s.Env,
		User:     s.User,
		Workdir:  s.Workdir,
		Hostname: s.Hostname,
		Labels:   s.Labels,
	}
}

func specOut(s session.Spec) client.Spec {
	return client.Spec{
		Version:  s.Version,
		Template: s.Template,
		Resources: client.Resources{
			CPUMillis: s.Resources.CPUMillis,
			MemoryMiB: s.Resources.MemoryMiB,
			DiskMiB:   s.Resources.DiskMiB,
			PIDs:      s.Resources.PIDs,
		},
		TimeoutSeconds: int64(s.Timeout),
		Env:            s.Env,
		User:           s.User,
		Workdir:        s.Workdir,
		Hostname:       s.Hostname,
		Labels:         s.Labels,
	}
}

func principalOut(p session.Principal) client.Principal {
	return client.Principal{Subject: p.Subject, OnBehalfOf: p.OnBehalfOf, Trigger: p.Trigger}
}

func sessionOut(s session.Session) client.SessionInfo {
	out := client.SessionInfo{
		ID:         string(s.ID),
		Version:    s.Version,
		State:      client.State(s.State),
		Reason:     string(s.Reason),
		Detail:     s.Detail,
		Spec:       specOut(s.Spec),
		SpecDigest: s.SpecDigest,
		Owner:      principalOut(s.Owner),
		Node:       string(s.Node),
		Generation: s.Generation,
		Template:   s.Template,
		CreatedAt:  s.CreatedAt,
		StartedAt:  s.StartedAt,
		EndedAt:    s.EndedAt,
		Deadline:   s.Deadline,
		Residuals:  s.Residuals,
	}
	if s.Generation > 0 {
		out.Sandbox = string(s.SandboxID())
	}
	return out
}

func timingOut(t journal.Timing) []client.Phase {
	var out []client.Phase
	for _, p := range t {
		out = append(out, client.Phase{Name: p.Name, Microseconds: p.Took.Microseconds()})
	}
	return out
}

func commandIn(c client.Command) workload.Command {
	out := workload.Command{
		Argv:    c.Argv,
		Env:     c.Env,
		Cwd:     c.Cwd,
		User:    c.User,
		Stdin:   c.Stdin,
		Timeout: time.Duration(c.TimeoutSeconds * float64(time.Second)),
		Tag:     c.Tag,
	}
	if c.PTY != nil {
		out.PTY = &workload.Size{Cols: c.PTY.Cols, Rows: c.PTY.Rows}
	}
	return out
}

func exitOut(e workload.Exit) client.Exit {
	return client.Exit{Code: e.Code, Signal: e.Signal, OOM: e.OOM, Error: e.Error}
}

func commandOut(c workload.CommandInfo) client.CommandInfo {
	out := client.CommandInfo{
		ID:        c.ID,
		PID:       c.PID,
		Argv:      c.Argv,
		Cwd:       c.Cwd,
		User:      c.User,
		Tag:       c.Tag,
		PTY:       c.PTY,
		Running:   c.Exit == nil,
		StartedAt: c.StartedAt,
	}
	if c.Exit != nil {
		e := exitOut(*c.Exit)
		out.Exit = &e
	}
	return out
}

func fileOut(f workload.FileInfo) client.FileInfo {
	out := client.FileInfo{
		Path:    f.Path,
		Type:    client.FileType(f.Type),
		Size:    f.Size,
		Mode:    f.Mode,
		User:    f.Owner,
		Group:   f.Group,
		ModTime: f.ModTime,
		Target:  strings.ToValidUTF8(f.SymlinkTarget, string(utf8.RuneError)),
		SHA256:  f.SHA256,
	}
	if !utf8.ValidString(f.Path) {
		out.Path, out.RawPath = strings.ToValidUTF8(f.Path, string(utf8.RuneError)), []byte(f.Path)
	}
	return out
}

func statsOut(s driver.Stats) client.Stats {
	return client.Stats{
		CPUMicroseconds: s.CPU.Microseconds(),
		MemoryBytes:     s.MemoryBytes,
		MemoryPeakBytes: s.MemoryPeakBytes,
		PIDs:            s.PIDs,
		OOMKills:        s.OOMKills,
		OutboundRefused: s.OutboundRefused,
	}
}

func eventOut(s audit.Stored) client.Event {
	e := s.Event
	id, _ := e.Session()
	out := client.Event{
		Record:        string(e.Record),
		Session:       string(id),
		Seq:           e.Seq,
		Time:          e.Time,
		Action:        string(e.Action),
		Outcome:       string(e.Outcome),
		Actor:         principalOut(e.Actor),
		Node:          string(e.Node),
		Generation:    e.Generation,
		Sandbox:       string(e.SandboxID()),
		Trace:         string(e.Trace),
		Object:        e.Object,
		Concludes:     e.Concludes,
		Ref:           e.Ref,
		Payload:       s.Payload,
		Version:       e.Version,
		Boot:          e.Boot,
		UptimeMicros:  e.Uptime,
		Prev:          e.Prev,
		Hash:          s.Hash,
		PayloadCommit: e.Commit,
	}
	if e.Decision != (audit.Decision{}) {
		out.Decision = &client.Decision{Verdict: string(e.Decision.Verdict), Policy: e.Decision.Policy}
	}
	return out
}

func templateOut(l template.Listed) client.Template {
	out := client.Template{
		Digest:      string(l.Digest),
		ImageDigest: string(l.ImageDigest),
		ImageBytes:  l.ImageBytes,
		Source:      l.Source,
		Env:         l.Config.Env,
		User:        l.Config.User,
		Workdir:     l.Config.Workdir,
		Cmd:         l.Config.Cmd,
		CreatedAt:   l.Created,
		Notes:       l.Notes,
		InUse:       len(l.Leases),
	}
	for _, n := range l.Names {
		out.Names = append(out.Names, n.String())
	}
	if l.Broken != nil {
		out.Broken = l.Broken.Error()
	}
	return out
}

func templateIn(b client.BuildTemplate) template.Spec {
	s := template.Spec{Version: b.Version, Name: b.Name, Env: b.Env, User: b.User, Workdir: b.Workdir, Cmd: b.Cmd}
	if f := b.From.HostPackages; f != nil {
		s.From.HostPackages = &template.HostPackages{Packages: f.Packages}
	}
	if f := b.From.Image; f != nil {
		s.From.Image = &template.Image{Ref: f.Ref, PlainHTTP: f.PlainHTTP}
		if c := f.Credentials; c != nil {
			s.From.Image.Credentials = &template.Credentials{Username: c.Username, PasswordEnv: c.PasswordEnv,
				PasswordFile: c.PasswordFile, DockerConfig: c.DockerConfig}
		}
	}
	if f := b.From.Tarball; f != nil {
		s.From.Tarball = &template.Tarball{Path: f.Path, Ref: f.Ref}
	}
	if f := b.From.Layout; f != nil {
		s.From.Layout = &template.Layout{Path: f.Path, Ref: f.Ref}
	}
	if f := b.From.Directory; f != nil {
		s.From.Directory = &template.Directory{Path: f.Path}
	}
	if f := b.From.Tar; f != nil {
		s.From.Tar = &template.Tar{Path: f.Path}
	}
	return s
}

func keyOut(k auth.Key) client.Key {
	return client.Key{ID: k.ID, Label: k.Label, Role: client.Role(k.Role), CreatedAt: k.CreatedAt, CreatedBy: k.CreatedBy, RevokedAt: k.RevokedAt}
}
