package leak

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"
)

// processes lists the processes that live in the caller's mount or network
// namespace, or that have a folder of the scope in their command line.
func processes(_ context.Context, scope Scope) ([]string, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	own := map[string]string{}
	for _, ns := range []string{"mnt", "net"} {
		own[ns], err = os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			return nil, err
		}
	}
	var found []string
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if text, ours := describe(pid, own, scope); ours {
			found = append(found, text)
		}
	}
	return found, nil
}

// describe reads one process; one that has ended meanwhile is nobody's.
func describe(pid int, own map[string]string, scope Scope) (string, bool) {
	dir := fmt.Sprintf("/proc/%d/", pid)
	stat, err := os.ReadFile(dir + "stat")
	if err != nil {
		return "", false
	}
	// The name in parentheses may hold anything; the state follows the last one.
	_, rest, found := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')'):]), " ")
	if !found || rest[0] == 'Z' || rest[0] == 'X' {
		return "", false
	}
	raw, err := os.ReadFile(dir + "cmdline")
	if err != nil || len(raw) == 0 { // Kernel threads have no command line.
		return "", false
	}
	cmdline := strings.TrimSpace(strings.ReplaceAll(string(raw), "\x00", " "))
	text := fmt.Sprintf("%d %s", pid, cmdline)
	for ns, id := range own {
		if link, err := os.Readlink(dir + "ns/" + ns); err == nil && link == id {
			return text, true
		}
	}
	for _, folder := range scope.Dirs {
		if strings.Contains(cmdline, folder) {
			return text, true
		}
	}
	return "", false
}

func mounts(context.Context, Scope) ([]string, error) {
	all, err := mountinfo.GetMounts(nil)
	if err != nil {
		return nil, err
	}
	found := make([]string, len(all))
	for i, m := range all {
		found[i] = fmt.Sprintf("%s (%s)", m.Mountpoint, m.FSType)
	}
	return found, nil
}

// cgroups lists the folders of all hierarchies, v1 and v2.
func cgroups(_ context.Context, scope Scope) ([]string, error) {
	all, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, err
	}
	var found []string
	for _, m := range all {
		err := filepath.WalkDir(m.Mountpoint, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil {
				return err
			}
			if d.IsDir() && path != m.Mountpoint && strings.Contains(path, scope.CgroupPrefix) {
				found = append(found, path)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return found, nil
}

func links(context.Context, Scope) ([]string, error) {
	all, err := netlink.LinkList()
	if err != nil {
		return nil, err
	}
	found := make([]string, len(all))
	for i, l := range all {
		found[i] = fmt.Sprintf("%s (%s)", l.Attrs().Name, l.Type())
	}
	return found, nil
}

// filterRules lists chains and rules of both address families, without counters.
func filterRules(ctx context.Context, _ Scope) ([]string, error) {
	counters := regexp.MustCompile(` \[\d+:\d+\]$`)
	var found []string
	for _, save := range []string{"iptables-save", "ip6tables-save"} {
		path, err := exec.LookPath(save)
		if err != nil {
			continue // Without the program nothing could have made a rule either.
		}
		out, err := exec.CommandContext(ctx, path).Output()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", save, err)
		}
		table := ""
		for line := range strings.Lines(string(out)) {
			line = strings.TrimSpace(line)
			switch {
			case line == "" || line[0] == '#' || line == "COMMIT":
			case line[0] == '*':
				table = line[1:]
			case line[0] == ':' && !strings.HasSuffix(strings.Fields(line)[1], "-"):
				// A built-in chain is always there; its table appears by being looked at.
			default:
				found = append(found, strings.TrimSuffix(save, "-save")+" "+table+" "+counters.ReplaceAllString(line, ""))
			}
		}
	}
	return found, nil
}

// sockets lists unix sockets with a path and listening TCP ports.
func sockets(context.Context, Scope) ([]string, error) {
	var found []string
	unix, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(unix)) {
		// A path is the eighth field; 00010000 marks a socket that listens.
		field := strings.Fields(line)
		if len(field) >= 8 && field[3] == "00010000" {
			found = append(found, "unix "+field[7])
		}
	}
	for _, proto := range []string{"tcp", "tcp6"} {
		table, err := os.ReadFile("/proc/net/" + proto)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(table)) {
			const listening = "0A"
			field := strings.Fields(line)
			if len(field) > 3 && field[3] == listening {
				found = append(found, proto+" "+field[1])
			}
		}
	}
	return found, nil
}

// files lists what is in the folders of the scope, with its kind.
func files(_ context.Context, scope Scope) ([]string, error) {
	var found []string
	for _, dir := range scope.Dirs {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil {
				return err
			}
			found = append(found, fmt.Sprintf("%s %s", d.Type(), path))
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return found, nil
}

// passed lists what clients of OCI runtimes have put into the folder for temporary files to pass it
// to a runtime: descriptions of execs and sockets of terminals, which stay if the client is killed.
// Nothing tells whose they are, but those of others go away by themselves.
func passed(context.Context, Scope) ([]string, error) {
	var found []string
	for _, pattern := range []string{"runc-process*", "pty*/pty.sock"} {
		paths, err := filepath.Glob(filepath.Join(os.TempDir(), pattern))
		if err != nil {
			return nil, err
		}
		found = append(found, paths...)
	}
	return found, nil
}
