package ocispec

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// DefaultStopSignal stops containers whose configuration and image name no signal.
const DefaultStopSignal = "SIGTERM"

// process sets command, environment, folder, terminal and limits of the first process.
func (d *draft) process() error {
	p := d.spec.Process
	config, image := d.in.Config, d.in.Image.Config
	args, err := command(config, image.Entrypoint, image.Cmd)
	if err != nil {
		return err
	}
	p.Args = args
	p.Terminal = config.GetTty()
	p.NoNewPrivileges = d.sc.GetNoNewPrivs()
	if p.Cwd, err = workingDir(config.GetWorkingDir(), image.WorkingDir); err != nil {
		return err
	}
	if err := d.environment(); err != nil {
		return err
	}
	for _, name := range sortedKeys(d.opts.Rlimits) {
		setRlimit(p, name, d.host.clampRlimit(name, d.opts.Rlimits[name]))
	}
	if r := config.GetLinux().GetResources(); r != nil {
		p.OOMScoreAdj = new(d.OOMScore(r.GetOomScoreAdj()))
	}
	d.result.StopSignal = stopSignal(config.GetStopSignal(), image.StopSignal)
	return nil
}

// command puts together what runs: a command replaces the image's entry point and, without
// arguments of its own, the image's arguments too.
func command(config *criv1.ContainerConfig, entrypoint, cmd []string) ([]string, error) {
	run, args := config.GetCommand(), config.GetArgs()
	if len(run) == 0 {
		run = entrypoint
		if len(args) == 0 {
			args = cmd
		}
	}
	all := slices.Concat(run, args)
	if len(all) == 0 {
		return nil, fmt.Errorf("no command: neither the container nor its image names one: %w", errdefs.ErrInvalidArgument)
	}
	return all, nil
}

// descriptorPath matches folders that lead through a process's descriptors and links to
// places outside of the container.
var descriptorPath = regexp.MustCompile(`^(/proc/[^/]+/(task|fd|fdinfo|cwd|root|map_files)|/dev/fd)(/|$)`)

func workingDir(asked, image string) (string, error) {
	dir := asked
	if dir == "" {
		dir = image
	}
	if dir == "" {
		return "/", nil
	}
	if !path.IsAbs(dir) {
		return "", fmt.Errorf("working directory %q is not absolute: %w", dir, errdefs.ErrInvalidArgument)
	}
	if descriptorPath.MatchString(path.Clean(dir)) {
		return "", fmt.Errorf("working directory %q leads through a process's descriptors: %w", dir, errdefs.ErrInvalidArgument)
	}
	return dir, nil
}

// environment puts the defaults, the base specification's, the image's and the request's
// variables together; a later one replaces an earlier one in its place.
func (d *draft) environment() error {
	hostname := d.in.SandboxConfig.GetHostname()
	if hostname == "" {
		hostname = d.host.Hostname
	}
	env := []string{defaultPath, "HOSTNAME=" + hostname}
	if d.in.Config.GetTty() {
		env = setEnv(env, "TERM=xterm")
	}
	for _, kv := range slices.Concat(d.spec.Process.Env, d.in.Image.Config.Env) {
		env = setEnv(env, kv)
	}
	for _, kv := range d.in.Config.GetEnvs() {
		if kv.GetKey() == "" || strings.ContainsAny(kv.GetKey(), "=\x00") || strings.Contains(string(kv.GetValue()), "\x00") {
			return fmt.Errorf("environment variable %q: bad name or value: %w", kv.GetKey(), errdefs.ErrInvalidArgument)
		}
		env = setEnv(env, kv.GetKey()+"="+string(kv.GetValue()))
	}
	d.spec.Process.Env = env
	return nil
}

// setEnv adds or replaces a variable. What has no "=" is no variable.
func setEnv(env []string, kv string) []string {
	name, _, ok := strings.Cut(kv, "=")
	if !ok || name == "" {
		return env
	}
	i := slices.IndexFunc(env, func(have string) bool { return strings.HasPrefix(have, name+"=") })
	if i < 0 {
		return append(env, kv)
	}
	env[i] = kv
	return env
}

// stopSignal picks the name of the stop signal.
func stopSignal(asked criv1.Signal, image string) string {
	if asked == criv1.Signal_SIGNAL_RUNTIME_DEFAULT {
		if image != "" {
			return image
		}
		return DefaultStopSignal
	}
	name := strings.TrimPrefix(asked.String(), "SIGNAL_")
	name = strings.Replace(name, "SIGRTMINPLUS", "SIGRTMIN+", 1)
	return strings.Replace(name, "SIGRTMAXMINUS", "SIGRTMAX-", 1)
}

// setRlimit adds or replaces a limit.
func setRlimit(p *specs.Process, name string, l Rlimit) {
	limit := specs.POSIXRlimit{Type: name, Soft: l.Soft, Hard: l.Hard}
	i := slices.IndexFunc(p.Rlimits, func(have specs.POSIXRlimit) bool { return have.Type == name })
	if i < 0 {
		p.Rlimits = append(p.Rlimits, limit)
		return
	}
	p.Rlimits[i] = limit
}

// clampRlimit lowers a limit to what the daemon can give.
func (h Host) clampRlimit(name string, l Rlimit) Rlimit {
	highest, known := h.HardLimits[name]
	if known && !h.MayRaiseLimits {
		l.Hard = min(l.Hard, highest)
	}
	l.Soft = min(l.Soft, l.Hard)
	return l
}

// clampOOMScore raises a score to the lowest that the daemon can give. Kubelet asks for
// scores that a daemon without CAP_SYS_RESOURCE cannot set.
func (h Host) clampOOMScore(adj int) int {
	adj = max(-1000, min(adj, 1000))
	if h.MayLowerOOMScore {
		return adj
	}
	return max(adj, h.OOMScoreAdj)
}

// OOMScore is the OOM score adjustment that a container gets who asks for one.
func (b *Builder) OOMScore(asked int64) int { return b.host.clampOOMScore(int(asked)) }

// ExecProcess returns a further process for a container with the given specification: it
// has everything of the container's first process but the command and the terminal.
func ExecProcess(spec *specs.Spec, cmd []string, tty bool) specs.Process {
	p := *spec.Process
	p.Args = slices.Clone(cmd)
	p.CommandLine = ""
	p.ConsoleSize = nil
	p.Terminal = tty
	p.Env = slices.Clone(p.Env)
	hasTerm := slices.ContainsFunc(p.Env, func(kv string) bool { return strings.HasPrefix(kv, "TERM=") })
	if tty && !hasTerm {
		p.Env = append(p.Env, "TERM=xterm")
	}
	return p
}
