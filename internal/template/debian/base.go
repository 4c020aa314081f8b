package debian

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"bivy/internal/template/tree"
)

// BasePackages returns the packages of the template "base". It includes essential
// packages, because other packages do not declare dependencies on them.
func BasePackages() []string {
	return []string{
		"base-files", "bash", "ca-certificates", "coreutils", "curl", "dash", "debianutils",
		"diffutils", "findutils", "git", "grep", "gzip", "hostname", "iproute2", "less",
		"libc-bin", "mawk", "ncurses-base", "ncurses-bin", "netbase", "openssl", "procps",
		"python3", "sed", "sudo", "tar", "util-linux", "xz-utils",
	}
}

// The default account of a template's processes.
const (
	userName = "user"
	userHome = "/home/user"
	userID   = 1000
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// account is a standard line of /etc/passwd or /etc/group.
type account struct {
	name string
	id   uint32
}

// users and groups are those with fixed numbers in Debian's policy.
func users() []account {
	return []account{
		{"daemon", 1}, {"bin", 2}, {"sys", 3}, {"sync", 4}, {"games", 5}, {"man", 6}, {"lp", 7}, {"mail", 8},
		{"news", 9}, {"uucp", 10}, {"proxy", 13}, {"www-data", 33}, {"backup", 34}, {"list", 38}, {"irc", 39},
		{"nobody", 65534},
	}
}

func groups() []account {
	return []account{
		{"root", 0}, {"daemon", 1}, {"bin", 2}, {"sys", 3}, {"adm", 4}, {"tty", 5}, {"disk", 6}, {"lp", 7},
		{"mail", 8}, {"news", 9}, {"uucp", 10}, {"man", 12}, {"proxy", 13}, {"kmem", 15}, {"dialout", 20},
		{"fax", 21}, {"voice", 22}, {"cdrom", 24}, {"floppy", 25}, {"tape", 26}, {"sudo", 27}, {"audio", 29},
		{"dip", 30}, {"www-data", 33}, {"backup", 34}, {"operator", 37}, {"list", 38}, {"irc", 39}, {"src", 40},
		{"shadow", 42}, {"utmp", 43}, {"video", 44}, {"sasl", 45}, {"plugdev", 46}, {"staff", 50}, {"games", 60},
		{userName, userID}, {"users", 100}, {"nogroup", 65534},
	}
}

func knownUID(id uint32) bool {
	return id == 0 || slices.ContainsFunc(users(), func(a account) bool { return a.id == id })
}

func knownGID(id uint32) bool {
	return slices.ContainsFunc(groups(), func(a account) bool { return a.id == id })
}

// The shells' start-up files use builtins only: clients run every command as
// "bash -l -c", which then starts no other program.
const (
	profile = `# For login shells of every user. Builtins only: a login shell starts no program.

case ":${PATH-}:" in
*::* | *:.:*) PATH="` + defaultPath + `" ;;
*:/usr/bin:*) ;;
*) PATH="` + defaultPath + `" ;;
esac
export PATH
: "${LANG:=C.UTF-8}"
export LANG

if [ -n "${PS1-}" ]; then
	if [ -n "${BASH-}" ] && [ "$BASH" != /bin/sh ]; then
		if [ -f /etc/bash.bashrc ]; then
			. /etc/bash.bashrc
		fi
	else
		PS1='$ '
	fi
fi

if [ -d /etc/profile.d ]; then
	for i in /etc/profile.d/*.sh; do
		if [ -r "$i" ]; then
			. "$i"
		fi
	done
	unset i
fi
`
	systemBashrc = `# For interactive bash of every user. Builtins only.

[ -n "${PS1-}" ] || return 0

shopt -s checkwinsize
PS1='\u@\h:\w\$ '
`
	userProfile = `# For login shells. Builtins only: a login shell starts no program.

if [ -n "${BASH_VERSION-}" ] && [ -f "$HOME/.bashrc" ]; then
	. "$HOME/.bashrc"
fi
for d in "$HOME/bin" "$HOME/.local/bin"; do
	case ":$PATH:" in
	*":$d:"*) ;;
	*) [ -d "$d" ] && PATH="$d:$PATH" ;;
	esac
done
unset d
`
	userBashrc = `# For interactive bash. Builtins only.

case $- in
*i*) ;;
*) return 0 ;;
esac

HISTCONTROL=ignoreboth
HISTSIZE=1000
HISTFILESIZE=2000
shopt -s histappend checkwinsize
PS1='\u@\h:\w\$ '
alias ls='ls --color=auto'
alias grep='grep --color=auto'
alias ll='ls -alF'
`
	bashLogout = "# For login shells when they end.\n"
)

const hosts = "127.0.0.1\tlocalhost bivy\n::1\tlocalhost ip6-localhost ip6-loopback\n"

const nsswitch = `passwd:    files
group:     files
shadow:    files
hosts:     files dns
networks:  files
protocols: files
services:  files
`

const sudoers = `Defaults env_reset
Defaults secure_path="` + defaultPath + `"
Defaults !mail_badpass, !lecture

root ALL=(ALL:ALL) ALL
%sudo ALL=(ALL:ALL) ALL

@includedir /etc/sudoers.d
`

// pamStack returns the files that other files in /etc/pam.d include.
func pamStack() map[string]string {
	return map[string]string{
		"common-auth":                   "auth [success=1 default=ignore] pam_unix.so nullok\nauth requisite pam_deny.so\nauth required pam_permit.so\n",
		"common-account":                "account [success=1 new_authtok_reqd=done default=ignore] pam_unix.so\naccount requisite pam_deny.so\naccount required pam_permit.so\n",
		"common-password":               "password [success=1 default=ignore] pam_unix.so obscure yescrypt\npassword requisite pam_deny.so\npassword required pam_permit.so\n",
		"common-session":                "session [default=1] pam_permit.so\nsession requisite pam_deny.so\nsession required pam_permit.so\nsession required pam_unix.so\n",
		"common-session-noninteractive": "session [default=1] pam_permit.so\nsession requisite pam_deny.so\nsession required pam_permit.so\nsession required pam_unix.so\n",
		"other":                         "@include common-auth\n@include common-account\n@include common-password\n@include common-session\n",
	}
}

// generate adds the accounts and the configuration of a new system to t: the files
// that are created on a host when it is installed and that identify it.
func generate(t *tree.Tree, packages []*pkg) error {
	for _, d := range []struct {
		name     string
		mode     uint32
		uid, gid uint32
	}{
		{"/etc", 0o755, 0, 0}, {"/home", 0o755, 0, 0}, {"/root", 0o700, 0, 0},
		{"/boot", 0o755, 0, 0}, {"/dev", 0o755, 0, 0}, {"/media", 0o755, 0, 0}, {"/mnt", 0o755, 0, 0},
		{"/opt", 0o755, 0, 0}, {"/srv", 0o755, 0, 0},
		{"/proc", 0o555, 0, 0}, {"/sys", 0o555, 0, 0},
		{"/run", 0o755, 0, 0}, {"/run/lock", 0o1777, 0, 0}, {"/tmp", 0o1777, 0, 0},
		{"/usr/local", 0o755, 0, 0}, {"/usr/local/bin", 0o755, 0, 0}, {"/usr/local/etc", 0o755, 0, 0},
		{"/usr/local/lib", 0o755, 0, 0}, {"/usr/local/sbin", 0o755, 0, 0}, {"/usr/local/share", 0o755, 0, 0},
		{"/usr/local/src", 0o755, 0, 0},
		{"/var", 0o755, 0, 0}, {"/var/cache", 0o755, 0, 0}, {"/var/lib", 0o755, 0, 0}, {"/var/log", 0o755, 0, 0},
		{"/var/mail", 0o2775, 0, 8}, {"/var/opt", 0o755, 0, 0}, {"/var/spool", 0o755, 0, 0}, {"/var/tmp", 0o1777, 0, 0},
		{userHome, 0o755, userID, userID},
	} {
		ino := dirInode(d.mode)
		ino.UID, ino.GID = d.uid, d.gid
		if have := t.Lookup(d.name); have != nil && !have.IsDir() {
			if err := t.Remove(d.name); err != nil {
				return err
			}
		}
		if err := t.Put(d.name, ino); err != nil {
			return err
		}
	}
	for name, target := range map[string]string{
		"/var/run":  "/run",
		"/var/lock": "/run/lock",
		"/etc/mtab": "../proc/self/mounts",
	} {
		if err := t.Remove(name); err != nil {
			return err
		}
		if err := t.Put(name, linkInode(target)); err != nil {
			return err
		}
	}
	if err := programLinks(t); err != nil {
		return err
	}
	if err := configuration(t); err != nil {
		return err
	}
	return statusOf(t, packages)
}

// programLinks creates links to programs that installation scripts of packages
// create.
func programLinks(t *tree.Tree) error {
	for _, l := range []struct{ name, target string }{
		{"/usr/bin/python", "python3"},
		{"/bin/sh", "dash"},
		{"/bin/sh", "bash"},
	} {
		dir := l.name[:strings.LastIndexByte(l.name, '/')]
		if t.Lookup(l.name) != nil || t.Stat(dir+"/"+l.target) == nil {
			continue
		}
		if err := t.Put(l.name, linkInode(l.target)); err != nil {
			return err
		}
	}
	return nil
}

func configuration(t *tree.Tree) error {
	type file struct {
		name string
		mode uint32
		gid  uint32
		text string
	}
	var passwd, shadow, group strings.Builder
	passwd.WriteString("root:x:0:0:root:/root:/bin/bash\n")
	shadow.WriteString("root:*:19000:0:99999:7:::\n")
	for _, a := range users() {
		gid, home := a.id, "/nonexistent"
		if a.name == "games" {
			gid = 60
		}
		if a.name == "man" {
			gid = 12
		}
		if a.name == "sync" {
			gid = 65534
		}
		passwd.WriteString(a.name + ":x:" + utoa(a.id) + ":" + utoa(gid) + ":" + a.name + ":" + home + ":/usr/sbin/nologin\n")
		shadow.WriteString(a.name + ":*:19000:0:99999:7:::\n")
	}
	passwd.WriteString(userName + ":x:" + utoa(userID) + ":" + utoa(userID) + "::" + userHome + ":/bin/bash\n")
	shadow.WriteString(userName + ":*:19000:0:99999:7:::\n")
	for _, g := range groups() {
		members := ""
		if g.name == "sudo" || g.name == "users" {
			members = userName
		}
		group.WriteString(g.name + ":x:" + utoa(g.id) + ":" + members + "\n")
	}
	files := []file{
		{"/etc/passwd", 0o644, 0, passwd.String()},
		{"/etc/group", 0o644, 0, group.String()},
		{"/etc/shadow", 0o640, 42, shadow.String()},
		{"/etc/gshadow", 0o640, 42, ""},
		{"/etc/subuid", 0o644, 0, ""},
		{"/etc/subgid", 0o644, 0, ""},
		{"/etc/hostname", 0o644, 0, "bivy\n"},
		{"/etc/hosts", 0o644, 0, hosts},
		{"/etc/resolv.conf", 0o644, 0, ""},
		{"/etc/machine-id", 0o444, 0, ""},
		{"/etc/nsswitch.conf", 0o644, 0, nsswitch},
		{"/etc/fstab", 0o644, 0, ""},
		{"/etc/environment", 0o644, 0, ""},
		{"/etc/timezone", 0o644, 0, "Etc/UTC\n"},
		{"/etc/shells", 0o644, 0, "/bin/sh\n/bin/bash\n/usr/bin/bash\n/bin/dash\n/usr/bin/dash\n"},
		{"/etc/profile", 0o644, 0, profile},
		{"/etc/bash.bashrc", 0o644, 0, systemBashrc},
	}
	if t.Stat("/usr/bin/sudo") != nil {
		files = append(files,
			file{"/etc/sudoers", 0o440, 0, sudoers},
			file{"/etc/sudoers.d/" + userName, 0o440, 0, userName + " ALL=(ALL:ALL) NOPASSWD: ALL\n"})
	}
	pam := pamStack()
	for _, n := range slices.Sorted(maps.Keys(pam)) {
		files = append(files, file{"/etc/pam.d/" + n, 0o644, 0, pam[n]})
	}
	for _, f := range files {
		ino := fileInode(f.mode, f.text)
		ino.GID = f.gid
		if err := putNew(t, f.name, ino); err != nil {
			return err
		}
	}
	for dir, owner := range map[string]uint32{"/etc/skel": 0, "/root": 0, userHome: userID} {
		for name, text := range map[string]string{".profile": userProfile, ".bashrc": userBashrc, ".bash_logout": bashLogout} {
			ino := fileInode(0o644, text)
			ino.UID, ino.GID = owner, owner
			if err := putNew(t, dir+"/"+name, ino); err != nil {
				return err
			}
		}
	}
	return nil
}

// putNew adds an entry and replaces an old one of any type.
func putNew(t *tree.Tree, name string, ino *tree.Inode) error {
	if err := t.ChargeBytes(name, ino.Size); err != nil {
		return err
	}
	if err := t.Remove(name); err != nil {
		return err
	}
	return t.Put(name, ino)
}

func utoa(n uint32) string { return strconv.FormatUint(uint64(n), 10) }

// statusOf writes dpkg's database for the packages of the image, for scanners and
// dpkg itself. It lists no conffiles, because some were left out.
func statusOf(t *tree.Tree, packages []*pkg) error {
	var b strings.Builder
	for _, p := range packages {
		b.WriteString(withoutConffiles(p.paragraph))
		b.WriteString("\n\n")
	}
	for _, d := range []string{"/var/lib/dpkg", "/var/lib/dpkg/info", "/var/lib/dpkg/updates"} {
		if err := t.Put(d, dirInode(0o755)); err != nil {
			return err
		}
	}
	return putNew(t, "/var/lib/dpkg/status", fileInode(0o644, b.String()))
}

func withoutConffiles(paragraph string) string {
	var out []string
	inside := false
	for l := range strings.SplitSeq(paragraph, "\n") {
		if !strings.HasPrefix(l, " ") {
			inside = strings.HasPrefix(l, "Conffiles:")
		}
		if !inside {
			out = append(out, l)
		}
	}
	return strings.Join(out, "\n")
}
