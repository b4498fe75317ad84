package security

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux"
	"github.com/opencontainers/selinux/go-selinux/label"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Labels are SELinux labels of a host. A label's level is given to nobody else until it is
// released.
type Labels interface {
	// Init returns the labels of a process and of its files for options such as "type:t"; what
	// they do not say is the host's default, with a level that nobody has.
	Init(options []string) (process, files string, err error)
	// Reserve takes the level of a label that was given out by an earlier process. Pods that
	// ask for the same level share it.
	Reserve(label string) error
	// Release gives up the level of a label.
	Release(label string)
	// Relabel labels a file or a folder with all that is below it.
	Relabel(path, label string) error
}

// hostLabels are those of this host. The reserved levels are the library's.
type hostLabels struct{}

// Init implements Labels.
func (hostLabels) Init(options []string) (process, files string, err error) {
	return label.InitLabels(options)
}

// Reserve implements Labels.
func (hostLabels) Reserve(l string) error {
	err := selinux.ReserveLabelV2(l)
	if errors.Is(err, selinux.ErrMCSAlreadyExists) {
		return nil
	}
	return err
}

// Release implements Labels.
func (hostLabels) Release(l string) { selinux.ReleaseLabel(l) }

// Relabel implements Labels.
func (hostLabels) Relabel(path, l string) error { return label.Relabel(path, l, false) }

func (p Policy) labels() Labels {
	if p.Labels == nil {
		return hostLabels{}
	}
	return p.Labels
}

// PodLabel gives a pod the label that its containers share, with a level of its own if it asks
// for none; empty for a pod without. A pod that shares the network, the processes or the IPC of
// the host is part of it and has a label only if it asks for one. FreeLabel gives the level up.
// Errors: ErrInvalidArgument for options that the policy of the host does not know.
func (p Policy) PodLabel(sc *criv1.LinuxSandboxSecurityContext) (string, error) {
	if !p.Host.SELinux {
		return "", nil // containers that ask for a label are refused
	}
	opts := SELinuxOptions(sc.GetSelinuxOptions())
	if opts == nil && (!p.LabelAll || sharesHost(sc.GetNamespaceOptions())) {
		return "", nil
	}
	process, _, err := p.labels().Init(labelOptions(opts))
	if err != nil {
		return "", fmt.Errorf("selinux: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return process, nil
}

// KeepLabel takes a pod's label that an earlier process gave.
func (p Policy) KeepLabel(podLabel string) error {
	if !p.Host.SELinux || podLabel == "" {
		return nil
	}
	err := p.labels().Reserve(podLabel)
	if err != nil {
		return fmt.Errorf("selinux: label %q of the pod: %w", podLabel, err)
	}
	return nil
}

// FreeLabel gives up a pod's label.
func (p Policy) FreeLabel(podLabel string) {
	if p.Host.SELinux && podLabel != "" {
		p.labels().Release(podLabel)
	}
}

func sharesHost(o *criv1.NamespaceOption) bool {
	return o.GetNetwork() == criv1.NamespaceMode_NODE || o.GetPid() == criv1.NamespaceMode_NODE || o.GetIpc() == criv1.NamespaceMode_NODE
}

// OptionsInForce are the first options that say anything, such as a container's before its
// pod's, with the level of the pod's label where they name none, or else what the pod's label
// says; nil if there is neither. Containers of one pod share files and may see each other's
// processes, so they have one level.
func OptionsInForce(podLabel string, of ...*criv1.SELinuxOption) (*criv1.SELinuxOption, error) {
	opts := SELinuxOptions(of...)
	if podLabel == "" {
		return opts, nil
	}
	shared, err := selinux.NewContext(podLabel)
	if err != nil {
		return nil, fmt.Errorf("selinux: label %q of the pod: %w: %w", podLabel, err, errdefs.ErrDataLoss)
	}
	if opts == nil {
		return &criv1.SELinuxOption{User: shared["user"], Role: shared["role"], Type: shared["type"], Level: shared["level"]}, nil
	}
	return &criv1.SELinuxOption{User: opts.GetUser(), Role: opts.GetRole(), Type: opts.GetType(), Level: cmp.Or(opts.GetLevel(), shared["level"])}, nil
}

// selinux labels the process and its files as asked for. Without a request the host's
// policy decides.
func (p Policy) selinux(spec *specs.Spec, opts *criv1.SELinuxOption) error {
	if opts == nil {
		return nil
	}
	if !p.Host.SELinux {
		return fmt.Errorf("selinux: the host has no SELinux: %w", errdefs.ErrFailedPrecondition)
	}
	var err error
	spec.Process.SelinuxLabel, spec.Linux.MountLabel, err = p.labels().Init(labelOptions(opts))
	if err != nil {
		return fmt.Errorf("selinux: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return nil
}

// SELinuxOptions are the first options that say anything; nil if none does.
func SELinuxOptions(of ...*criv1.SELinuxOption) *criv1.SELinuxOption {
	for _, o := range of {
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

// Relabel gives a mount's source the label of a container's files. Without options or without
// SELinux there are no labels and nothing to do; clients ask for it on every host. Errors:
// ErrInvalidArgument for options that the policy does not know.
func (p Policy) Relabel(source string, opts *criv1.SELinuxOption) error {
	if !p.Host.SELinux || opts == nil {
		return nil
	}
	_, files, err := p.labels().Init(labelOptions(opts))
	if err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	return p.labels().Relabel(source, files)
}
