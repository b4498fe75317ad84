// Package process says what the first process of a container, and each further one, runs and
// as whom: command, environment, folder, limits, user, groups and capabilities. It reads
// nothing but its arguments.
package process

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
)

// DefaultPath is the search path of processes that are given none.
const DefaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Request is what a first process is made from.
type Request struct {
	// Config is the container's configuration, Image that of its image.
	Config *criv1.ContainerConfig
	Image  imagespec.ImageConfig
	// Hostname is the name that the process sees.
	Hostname string
	// Rlimits are limits of every container, by type such as "RLIMIT_NOFILE".
	Rlimits map[string]host.Rlimit
	// Env are variables of every container, NAME=value; all others win.
	Env []string
}

// Set sets command, environment, folder, terminal and limits of the first process. Errors:
// ErrInvalidArgument.
func Set(p *specs.Process, req Request, on host.Facts) error {
	args, err := command(req.Config, req.Image.Entrypoint, req.Image.Cmd)
	if err != nil {
		return err
	}
	p.Args = args
	p.Terminal = req.Config.GetTty()
	p.NoNewPrivileges = req.Config.GetLinux().GetSecurityContext().GetNoNewPrivs()
	if p.Cwd, err = workingDir(req.Config.GetWorkingDir(), req.Image.WorkingDir); err != nil {
		return err
	}
	if p.Env, err = environment(p.Env, req); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(req.Rlimits)) {
		SetRlimit(p, name, on.ClampRlimit(name, req.Rlimits[name]))
	}
	if r := req.Config.GetLinux().GetResources(); r != nil {
		p.OOMScoreAdj = new(on.ClampOOMScore(int(r.GetOomScoreAdj())))
	}
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
	if i := slices.IndexFunc(all, func(arg string) bool { return strings.Contains(arg, "\x00") }); i >= 0 {
		return nil, fmt.Errorf("command: argument %q has a NUL byte: %w", all[i], errdefs.ErrInvalidArgument)
	}
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
	if strings.Contains(dir, "\x00") {
		return "", fmt.Errorf("working directory %q has a NUL byte: %w", dir, errdefs.ErrInvalidArgument)
	}
	if len(dir) >= unix.PathMax {
		return "", fmt.Errorf("working directory of %d bytes, at most %d are possible: %w", len(dir), unix.PathMax-1, errdefs.ErrInvalidArgument)
	}
	if throughDescriptor(dir) {
		return "", fmt.Errorf("working directory %q leads through a process's descriptors: %w", dir, errdefs.ErrInvalidArgument)
	}
	return dir, nil
}

// throughDescriptor says whether a path passes through a descriptor on its way, also if dots
// lead on from there.
func throughDescriptor(dir string) bool {
	for i := range dir {
		if dir[i] == '/' && descriptorPath.MatchString(path.Clean(dir[:i])) {
			return true
		}
	}
	return descriptorPath.MatchString(path.Clean(dir))
}

// environment puts the defaults, the node's, the base specification's, the image's and the request's
// variables together; a later one replaces an earlier one in its place.
func environment(base []string, req Request) ([]string, error) {
	env := NewEnvironment([]string{DefaultPath, "HOSTNAME=" + req.Hostname})
	if req.Config.GetTty() {
		env.Set("TERM=xterm")
	}
	for _, kv := range slices.Concat(req.Env, base, req.Image.Env) {
		env.Set(kv)
	}
	for _, kv := range req.Config.GetEnvs() {
		if kv.GetKey() == "" || strings.Contains(kv.GetKey(), "=") {
			return nil, fmt.Errorf("environment variable %q: bad name: %w", kv.GetKey(), errdefs.ErrInvalidArgument)
		}
		env.Set(kv.GetKey() + "=" + string(kv.GetValue()))
	}
	for _, kv := range env.List() {
		if name, _, _ := strings.Cut(kv, "="); strings.Contains(kv, "\x00") {
			return nil, fmt.Errorf("environment variable %q: bad name or value, with a NUL byte: %w", name, errdefs.ErrInvalidArgument)
		}
	}
	return env.List(), nil
}

// Environment is a list of variables, each with one value. However many there are, each is found at once.
type Environment struct {
	list []string
	at   map[string]int // by name
}

// NewEnvironment returns one with these variables, NAME=value, to begin with; it takes the list over.
func NewEnvironment(list []string) *Environment {
	e := &Environment{list: list, at: make(map[string]int, len(list))}
	for i, kv := range slices.Backward(list) {
		name, _, _ := strings.Cut(kv, "=")
		e.at[name] = i // the first of several
	}
	return e
}

// Set adds or replaces a variable. What has no "=", or no name, is no variable.
func (e *Environment) Set(kv string) {
	name, _, ok := strings.Cut(kv, "=")
	if !ok || name == "" {
		return
	}
	if i, known := e.at[name]; known {
		e.list[i] = kv
		return
	}
	e.at[name] = len(e.list)
	e.list = append(e.list, kv)
}

// List returns the variables in order.
func (e *Environment) List() []string { return e.list }

// SetRlimit adds or replaces a limit.
func SetRlimit(p *specs.Process, name string, l host.Rlimit) {
	limit := specs.POSIXRlimit{Type: name, Soft: l.Soft, Hard: l.Hard}
	i := slices.IndexFunc(p.Rlimits, func(have specs.POSIXRlimit) bool { return have.Type == name })
	if i < 0 {
		p.Rlimits = append(p.Rlimits, limit)
		return
	}
	p.Rlimits[i] = limit
}

// OnFirst is the way to choose the processors of further processes that [Exec] knows: the first
// one of the container's.
const OnFirst = "first"

// Exec returns a further process for a container with the given specification: it
// has everything of the container's first process but the command and the terminal. affinity is
// empty or [OnFirst].
func Exec(spec *specs.Spec, cmd []string, tty bool, affinity string) specs.Process {
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
	if first := firstProcessor(spec); affinity == OnFirst && first != "" {
		p.ExecCPUAffinity = &specs.CPUAffinity{Initial: first, Final: first}
	}
	return p
}

// firstProcessor is the first processor of a container's own set; empty if it has none.
func firstProcessor(spec *specs.Spec) string {
	if spec.Linux == nil || spec.Linux.Resources == nil || spec.Linux.Resources.CPU == nil {
		return ""
	}
	digits := func(r rune) bool { return r < '0' || r > '9' }
	set := spec.Linux.Resources.CPU.Cpus
	if end := strings.IndexFunc(set, digits); end >= 0 {
		return set[:end]
	}
	return set
}
