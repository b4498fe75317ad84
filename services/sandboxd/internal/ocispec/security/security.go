// Package security confines containers: masked paths, seccomp, AppArmor and SELinux. It reads
// profiles and asks the kernel for them, and changes nothing on the node but the labels of
// mount sources that a request wants relabelled. All of it may be called concurrently.
package security

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
)

// Old spellings of security profiles in the CRI.
const (
	profileDefault   = "runtime/default"
	profileDocker    = "docker/default"
	profileNone      = "unconfined"
	profileLocalhost = "localhost/"
)

// maxProfile bounds the size of a seccomp profile.
const maxProfile = 4 << 20

// Policy is what the node can do and does with those who ask for nothing.
type Policy struct {
	Host host.Facts
	// UnsetSeccomp is the profile of containers that name none: "runtime/default",
	// "localhost/<path>", or empty for unconfined.
	UnsetSeccomp string
	// AppArmorProfile is the name of the loaded profile that stands for the runtime's
	// default; empty means that there is none and such containers run unconfined.
	AppArmorProfile string
	// AppArmorLoaded says whether the kernel knows a profile of this name; nil leaves that to
	// the OCI runtime.
	AppArmorLoaded func(name string) (bool, error)
	// Labels are the host's SELinux labels; nil is the host's own.
	Labels Labels
	// LabelAll gives a label of its own to pods that ask for no SELinux options.
	LabelAll bool
}

// Set sets masked paths, seccomp, AppArmor and SELinux of a container; opts are its SELinux
// options, see [SELinuxOptions]. Errors: ErrInvalidArgument, ErrFailedPrecondition for what
// the host cannot do, ErrNotFound for a profile that is not there.
func (p Policy) Set(spec *specs.Spec, sc *criv1.LinuxContainerSecurityContext, opts *criv1.SELinuxOption) error {
	if sc.GetPrivileged() {
		// The old spelling is checked all the same.
		_, err := profile(sc.GetApparmor(), sc.GetApparmorProfile()) //nolint:staticcheck // old clients still set it
		if err != nil {
			return fmt.Errorf("apparmor: %w", err)
		}
		spec.Linux.Seccomp = nil
		return nil
	}
	spec.Linux.MaskedPaths = sc.GetMaskedPaths()
	spec.Linux.ReadonlyPaths = sc.GetReadonlyPaths()
	if err := p.seccomp(spec, sc); err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	if err := p.apparmor(spec, sc); err != nil {
		return fmt.Errorf("apparmor: %w", err)
	}
	return p.selinux(spec, opts)
}

// SetInit does the same for a pod's own process. Where the request says nothing the process
// has the default seccomp profile: it needs no other calls. Errors: as Set.
func (p Policy) SetInit(spec *specs.Spec, sc *criv1.LinuxSandboxSecurityContext, opts *criv1.SELinuxOption) error {
	asked, err := profile(sc.GetSeccomp(), sc.GetSeccompProfilePath()) //nolint:staticcheck // old clients still set it
	if err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	switch {
	case asked != nil:
		if spec.Linux.Seccomp, err = p.seccompProfile(asked, spec); err != nil {
			return fmt.Errorf("seccomp: %w", err)
		}
	case p.Host.Seccomp:
		spec.Linux.Seccomp = seccomp.DefaultProfile(spec)
	}
	if spec.Process.ApparmorProfile, err = p.apparmorProfile(sc.GetApparmor()); err != nil {
		return fmt.Errorf("apparmor: %w", err)
	}
	return p.selinux(spec, opts)
}

// profile returns a security profile, from its present or its old form. No profile at all
// is nil.
func profile(p *criv1.SecurityProfile, old string) (*criv1.SecurityProfile, error) {
	if p != nil || old == "" {
		return p, nil
	}
	switch {
	case old == profileDefault, old == profileDocker:
		return &criv1.SecurityProfile{ProfileType: criv1.SecurityProfile_RuntimeDefault}, nil
	case old == profileNone:
		return &criv1.SecurityProfile{ProfileType: criv1.SecurityProfile_Unconfined}, nil
	case strings.HasPrefix(old, profileLocalhost):
		return &criv1.SecurityProfile{
			ProfileType:  criv1.SecurityProfile_Localhost,
			LocalhostRef: strings.TrimPrefix(old, profileLocalhost),
		}, nil
	}
	return nil, fmt.Errorf("profile %q: %w", old, errdefs.ErrInvalidArgument)
}

func (p Policy) seccomp(spec *specs.Spec, sc *criv1.LinuxContainerSecurityContext) error {
	old := sc.GetSeccompProfilePath() //nolint:staticcheck // old clients still set it
	if old == "" {
		old = p.UnsetSeccomp
	}
	asked, err := profile(sc.GetSeccomp(), old)
	if err != nil || asked == nil {
		return err
	}
	spec.Linux.Seccomp, err = p.seccompProfile(asked, spec)
	return err
}

// seccompProfile returns the rules of a profile; nil for an unconfined one.
func (p Policy) seccompProfile(asked *criv1.SecurityProfile, spec *specs.Spec) (*specs.LinuxSeccomp, error) {
	if asked.GetProfileType() == criv1.SecurityProfile_Unconfined {
		return nil, nil
	}
	if !p.Host.Seccomp {
		return nil, fmt.Errorf("the kernel lacks it: %w", errdefs.ErrFailedPrecondition)
	}
	switch asked.GetProfileType() {
	case criv1.SecurityProfile_RuntimeDefault:
		return seccomp.DefaultProfile(spec), nil
	case criv1.SecurityProfile_Localhost:
		return readSeccomp(asked.GetLocalhostRef())
	default:
		return nil, fmt.Errorf("profile type %s: %w", asked.GetProfileType(), errdefs.ErrInvalidArgument)
	}
}

func readSeccomp(file string) (*specs.LinuxSeccomp, error) {
	if !filepath.IsAbs(file) {
		return nil, fmt.Errorf("profile %q is not an absolute path: %w", file, errdefs.ErrInvalidArgument)
	}
	info, err := os.Stat(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("profile %q: %w", file, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("profile %q is not a file: %w", file, errdefs.ErrInvalidArgument)
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	out := new(specs.LinuxSeccomp)
	if err := json.NewDecoder(io.LimitReader(f, maxProfile)).Decode(out); err != nil {
		return nil, fmt.Errorf("profile %q: %w: %w", file, err, errdefs.ErrInvalidArgument)
	}
	if out.DefaultAction == "" {
		return nil, fmt.Errorf("profile %q has no default action: %w", file, errdefs.ErrInvalidArgument)
	}
	if err := checkSeccomp(out); err != nil {
		return nil, fmt.Errorf("profile %q: %w: %w", file, err, errdefs.ErrInvalidArgument)
	}
	return out, nil
}

// checkSeccomp looks for actions and operators that no runtime knows. What a runtime knows of
// architectures and flags depends on its libseccomp.
func checkSeccomp(p *specs.LinuxSeccomp) error {
	actions := []specs.LinuxSeccompAction{
		specs.ActKill, specs.ActKillProcess, specs.ActKillThread, specs.ActTrap, specs.ActErrno,
		specs.ActTrace, specs.ActAllow, specs.ActLog, specs.ActNotify,
	}
	operators := []specs.LinuxSeccompOperator{
		specs.OpNotEqual, specs.OpLessThan, specs.OpLessEqual, specs.OpEqualTo, specs.OpGreaterEqual, specs.OpGreaterThan, specs.OpMaskedEqual,
	}
	if !slices.Contains(actions, p.DefaultAction) {
		return fmt.Errorf("default action %q is unknown", p.DefaultAction)
	}
	for _, call := range p.Syscalls {
		if !slices.Contains(actions, call.Action) {
			return fmt.Errorf("action %q of %q is unknown", call.Action, call.Names)
		}
		for _, arg := range call.Args {
			if !slices.Contains(operators, arg.Op) {
				return fmt.Errorf("operator %q of %q is unknown", arg.Op, call.Names)
			}
		}
	}
	return nil
}

// apparmor sets the profile. On a host without AppArmor every profile that somebody asked for
// is an error; who asks for none runs without one there.
func (p Policy) apparmor(spec *specs.Spec, sc *criv1.LinuxContainerSecurityContext) error {
	asked, err := profile(sc.GetApparmor(), sc.GetApparmorProfile()) //nolint:staticcheck // old clients still set it
	if err != nil {
		return err
	}
	spec.Process.ApparmorProfile, err = p.apparmorProfile(asked)
	return err
}

// apparmorProfile returns the name of a loaded profile, empty for none.
func (p Policy) apparmorProfile(asked *criv1.SecurityProfile) (string, error) {
	if !p.Host.AppArmor {
		if asked == nil || asked.GetProfileType() == criv1.SecurityProfile_Unconfined {
			return "", nil
		}
		return "", fmt.Errorf("profile %s %q: the host has no AppArmor: %w", asked.GetProfileType(), asked.GetLocalhostRef(), errdefs.ErrFailedPrecondition)
	}
	switch {
	case asked.GetProfileType() == criv1.SecurityProfile_Unconfined:
		return "", nil
	case asked.GetProfileType() == criv1.SecurityProfile_RuntimeDefault: // also nil
		if asked != nil && p.AppArmorProfile == "" {
			return "", fmt.Errorf("the runtime's default profile is not loaded: %w", errdefs.ErrFailedPrecondition)
		}
		return p.AppArmorProfile, nil
	}
	name := strings.TrimPrefix(asked.GetLocalhostRef(), profileLocalhost)
	if name == "" {
		return "", fmt.Errorf("localhost profile without a name: %w", errdefs.ErrInvalidArgument)
	}
	if p.AppArmorLoaded == nil {
		return name, nil
	}
	loaded, err := p.AppArmorLoaded(name)
	if err != nil {
		return "", fmt.Errorf("profile %q: %w", name, err)
	}
	if !loaded {
		return "", fmt.Errorf("profile %q is not loaded: %w", name, errdefs.ErrNotFound)
	}
	return name, nil
}
