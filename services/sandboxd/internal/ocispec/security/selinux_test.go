package security

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
)

// labels give each new label another level, as the library does where SELinux is on.
type labels struct {
	given, held, files []string
}

func (l *labels) Init(options []string) (process, files string, err error) {
	part := map[string]string{"user": "system_u", "role": "system_r", "type": "container_t", "level": fmt.Sprintf("s0:c%d,c99", len(l.given))}
	for _, o := range options {
		key, value, _ := strings.Cut(o, ":")
		if value == "bad" {
			return "", "", errors.New("unknown")
		}
		part[key] = value
	}
	process = strings.Join([]string{part["user"], part["role"], part["type"], part["level"]}, ":")
	l.given = append(l.given, process)
	l.held = append(l.held, process)
	return process, "system_u:object_r:container_file_t:" + part["level"], nil
}

func (l *labels) Reserve(label string) error {
	if label == "bad" {
		return errors.New("no label")
	}
	l.held = append(l.held, label)
	return nil
}

func (l *labels) Release(label string) {
	l.held = slices.DeleteFunc(l.held, func(h string) bool { return h == label })
}

func (l *labels) Relabel(path, label string) error {
	l.files = append(l.files, path+" "+label)
	return nil
}

func policy(l *labels) Policy {
	return Policy{Host: host.Facts{SELinux: true}, Labels: l, LabelAll: true}
}

func TestPodLabel(t *testing.T) {
	t.Parallel()
	node := criv1.NamespaceMode_NODE
	typed := &criv1.SELinuxOption{Type: "spc_t"}
	for name, tt := range map[string]struct {
		change func(*Policy)
		sc     *criv1.LinuxSandboxSecurityContext
		want   string
	}{
		"asks for nothing":         {nil, nil, "system_u:system_r:container_t:s0:c0,c99"},
		"asks for a type":          {nil, &criv1.LinuxSandboxSecurityContext{SelinuxOptions: typed}, "system_u:system_r:spc_t:s0:c0,c99"},
		"privileged":               {nil, &criv1.LinuxSandboxSecurityContext{Privileged: true}, "system_u:system_r:container_t:s0:c0,c99"},
		"network of the host":      {nil, &criv1.LinuxSandboxSecurityContext{NamespaceOptions: &criv1.NamespaceOption{Network: node}}, ""},
		"processes of the host":    {nil, &criv1.LinuxSandboxSecurityContext{NamespaceOptions: &criv1.NamespaceOption{Pid: node}}, ""},
		"IPC of the host":          {nil, &criv1.LinuxSandboxSecurityContext{NamespaceOptions: &criv1.NamespaceOption{Ipc: node}}, ""},
		"host network with a type": {nil, &criv1.LinuxSandboxSecurityContext{SelinuxOptions: typed, NamespaceOptions: &criv1.NamespaceOption{Network: node}}, "system_u:system_r:spc_t:s0:c0,c99"},
		"not labelled":             {func(p *Policy) { p.LabelAll = false }, nil, ""},
		"without SELinux":          {func(p *Policy) { p.Host.SELinux = false }, &criv1.LinuxSandboxSecurityContext{SelinuxOptions: typed}, ""},
	} {
		p := policy(&labels{})
		if tt.change != nil {
			tt.change(&p)
		}
		if got, err := p.PodLabel(tt.sc); err != nil || got != tt.want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, tt.want)
		}
	}
	_, err := policy(&labels{}).PodLabel(&criv1.LinuxSandboxSecurityContext{SelinuxOptions: &criv1.SELinuxOption{Type: "bad"}})
	if !errdefs.IsInvalidArgument(err) {
		t.Errorf("unknown options: %v", err)
	}
}

func TestLabelsAreFreed(t *testing.T) {
	t.Parallel()
	l := &labels{}
	p := policy(l)
	first, err := p.PodLabel(nil)
	if err != nil {
		t.Fatal(err)
	}
	for label, fails := range map[string]bool{"u:r:t:s0:c7": false, "": false, "bad": true} {
		if err := p.KeepLabel(label); (err != nil) != fails {
			t.Errorf("label %q: %v", label, err)
		}
	}
	p.FreeLabel(first)
	p.FreeLabel("")
	if diff := cmp.Diff([]string{"u:r:t:s0:c7"}, l.held); diff != "" {
		t.Errorf("held labels (-want +got):\n%s", diff)
	}
	p.Host.SELinux = false
	p.FreeLabel("u:r:t:s0:c7")
	if len(l.held) != 1 {
		t.Error("a label was given up without SELinux")
	}
}

// Containers of one pod have one level, whatever else they ask for.
func TestContainersShareTheLevelOfTheirPod(t *testing.T) {
	t.Parallel()
	p := policy(&labels{})
	podLabel, err := p.PodLabel(nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		podLabel string
		own      *criv1.SELinuxOption
		want     string // of the process
		files    string
	}{
		"asks for nothing": {podLabel, nil, podLabel, "system_u:object_r:container_file_t:s0:c0,c99"},
		"asks for a type":  {podLabel, &criv1.SELinuxOption{Type: "spc_t"}, "system_u:system_r:spc_t:s0:c0,c99", "system_u:object_r:container_file_t:s0:c0,c99"},
		"asks for a level": {podLabel, &criv1.SELinuxOption{Level: "s0:c5"}, "system_u:system_r:container_t:s0:c5", "system_u:object_r:container_file_t:s0:c5"},
		"without a label":  {"", nil, "", ""},
	} {
		opts, err := OptionsInForce(tt.podLabel, tt.own)
		if err != nil {
			t.Fatal(err)
		}
		spec := &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{}}
		if err := p.Set(spec, &criv1.LinuxContainerSecurityContext{}, opts); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if spec.Process.SelinuxLabel != tt.want || spec.Linux.MountLabel != tt.files {
			t.Errorf("%s: process %q, files %q, want %q, %q", name, spec.Process.SelinuxLabel, spec.Linux.MountLabel, tt.want, tt.files)
		}
		privileged := &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{}}
		if err := p.Set(privileged, &criv1.LinuxContainerSecurityContext{Privileged: true}, opts); err != nil || privileged.Process.SelinuxLabel != "" {
			t.Errorf("%s: a privileged process has %q, %v", name, privileged.Process.SelinuxLabel, err)
		}
	}
	if _, err := OptionsInForce("garbage", nil); !errdefs.IsDataLoss(err) {
		t.Errorf("a label that is none: %v", err)
	}
}

func TestRelabel(t *testing.T) {
	t.Parallel()
	l := &labels{}
	p := policy(l)
	if err := p.Relabel("/a", nil); err != nil {
		t.Error(err)
	}
	if err := p.Relabel("/b", &criv1.SELinuxOption{Level: "s0:c1"}); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]string{"/b system_u:object_r:container_file_t:s0:c1"}, l.files); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
