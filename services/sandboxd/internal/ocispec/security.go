package ocispec

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux/label"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
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

// security sets masked paths, seccomp, AppArmor and SELinux.
func (d *draft) security() error {
	if !d.privileged() {
		d.spec.Linux.MaskedPaths = d.sc.GetMaskedPaths()
		d.spec.Linux.ReadonlyPaths = d.sc.GetReadonlyPaths()
	}
	if err := d.seccomp(); err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	if err := d.apparmor(); err != nil {
		return fmt.Errorf("apparmor: %w", err)
	}
	if err := d.selinux(); err != nil {
		return fmt.Errorf("selinux: %w", err)
	}
	return nil
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

func (d *draft) seccomp() error {
	if d.privileged() {
		d.spec.Linux.Seccomp = nil
		return nil
	}
	old := d.sc.GetSeccompProfilePath() //nolint:staticcheck // old clients still set it
	if old == "" {
		old = d.opts.UnsetSeccomp
	}
	p, err := profile(d.sc.GetSeccomp(), old)
	if err != nil || p == nil {
		return err
	}
	d.spec.Linux.Seccomp, err = seccompProfile(p, d.host, d.spec)
	return err
}

// seccompProfile returns the rules of a profile; nil for an unconfined one.
func seccompProfile(p *criv1.SecurityProfile, host Host, spec *specs.Spec) (*specs.LinuxSeccomp, error) {
	if p.GetProfileType() == criv1.SecurityProfile_Unconfined {
		return nil, nil
	}
	if !host.Seccomp {
		return nil, fmt.Errorf("the kernel lacks it: %w", errdefs.ErrFailedPrecondition)
	}
	switch p.GetProfileType() {
	case criv1.SecurityProfile_RuntimeDefault:
		return seccomp.DefaultProfile(spec), nil
	case criv1.SecurityProfile_Localhost:
		return readSeccomp(p.GetLocalhostRef())
	default:
		return nil, fmt.Errorf("profile type %s: %w", p.GetProfileType(), errdefs.ErrInvalidArgument)
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
	return out, nil
}

// apparmor sets the profile. On a host without AppArmor every profile that somebody asked for
// is an error; who asks for none runs without one there.
func (d *draft) apparmor() error {
	old := d.sc.GetApparmorProfile() //nolint:staticcheck // old clients still set it
	p, err := profile(d.sc.GetApparmor(), old)
	if err != nil || d.privileged() {
		return err
	}
	d.spec.Process.ApparmorProfile, err = d.apparmorProfile(p)
	return err
}

// apparmorProfile returns the name of a loaded profile, empty for none.
func (b *Builder) apparmorProfile(p *criv1.SecurityProfile) (string, error) {
	if !b.host.AppArmor {
		if p == nil || p.GetProfileType() == criv1.SecurityProfile_Unconfined {
			return "", nil
		}
		return "", fmt.Errorf("profile %s %q: the host has no AppArmor: %w", p.GetProfileType(), p.GetLocalhostRef(), errdefs.ErrFailedPrecondition)
	}
	switch {
	case p.GetProfileType() == criv1.SecurityProfile_Unconfined:
		return "", nil
	case p.GetProfileType() == criv1.SecurityProfile_RuntimeDefault: // also nil
		if p != nil && b.opts.AppArmorProfile == "" {
			return "", fmt.Errorf("the runtime's default profile is not loaded: %w", errdefs.ErrFailedPrecondition)
		}
		return b.opts.AppArmorProfile, nil
	}
	name := strings.TrimPrefix(p.GetLocalhostRef(), profileLocalhost)
	if name == "" {
		return "", fmt.Errorf("localhost profile without a name: %w", errdefs.ErrInvalidArgument)
	}
	if b.opts.AppArmorLoaded == nil {
		return name, nil
	}
	loaded, err := b.opts.AppArmorLoaded(name)
	if err != nil {
		return "", fmt.Errorf("profile %q: %w", name, err)
	}
	if !loaded {
		return "", fmt.Errorf("profile %q is not loaded: %w", name, errdefs.ErrNotFound)
	}
	return name, nil
}

// selinux labels the process and its files as asked for. Without a request the host's
// policy decides.
func (d *draft) selinux() error {
	opts := d.selinuxOptions()
	if opts == nil || d.privileged() {
		return nil
	}
	if !d.host.SELinux {
		return fmt.Errorf("the host has no SELinux: %w", errdefs.ErrFailedPrecondition)
	}
	var err error
	d.spec.Process.SelinuxLabel, d.spec.Linux.MountLabel, err = label.InitLabels(labelOptions(opts))
	if err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	return nil
}

// selinuxOptions are the container's, else the pod's; nil if neither says anything.
func (d *draft) selinuxOptions() *criv1.SELinuxOption {
	for _, o := range []*criv1.SELinuxOption{
		d.sc.GetSelinuxOptions(),
		d.in.SandboxConfig.GetLinux().GetSecurityContext().GetSelinuxOptions(),
	} {
		if len(labelOptions(o)) > 0 {
			return o
		}
	}
	return nil
}

func labelOptions(o *criv1.SELinuxOption) []string {
	var out []string
	for _, part := range []struct{ key, value string }{
		{"user", o.GetUser()},
		{"role", o.GetRole()},
		{"type", o.GetType()},
		{"level", o.GetLevel()},
	} {
		if part.value != "" {
			out = append(out, part.key+":"+part.value)
		}
	}
	return out
}

// relabel gives a mount's source the label of the container's files. Without SELinux there
// are no labels and nothing to do; clients ask for it on every host.
func (d *draft) relabel(source string) error {
	opts := d.selinuxOptions()
	if !d.host.SELinux || opts == nil || d.privileged() {
		return nil
	}
	_, files, err := label.InitLabels(labelOptions(opts))
	if err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	return label.Relabel(source, files, false)
}
