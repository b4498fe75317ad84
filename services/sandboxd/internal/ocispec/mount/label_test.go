package mount

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/security"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// labels notes what is relabelled.
type labels struct{ relabelled []string }

func (*labels) Init([]string) (process, files string, err error) { return "process", "files", nil }
func (*labels) Reserve(string) error                             { return nil }
func (*labels) Release(string)                                   {}

func (l *labels) Relabel(path, label string) error {
	l.relabelled = append(l.relabelled, filepath.Base(path)+" "+label)
	return nil
}

// A labelled container may read the pod's files and what it asks to have relabelled, and no label
// of anything else is changed.
func TestSourcesAreRelabelled(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"hosts", "resolv", "asked", "other"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	for name, tt := range map[string]struct {
		privileged bool
		options    *criv1.SELinuxOption
		want       []string
	}{
		"labelled":   {false, &criv1.SELinuxOption{Level: "s0"}, []string{"asked files", "hosts files", "resolv files"}},
		"no label":   {false, nil, nil},
		"privileged": {true, &criv1.SELinuxOption{Level: "s0"}, nil},
	} {
		l := &labels{}
		p := Policy{Security: security.Policy{Host: host.Facts{SELinux: true}, Labels: l}, Sources: &Sources{}}
		_, err := p.Set(&specs.Spec{Linux: &specs.Linux{}}, Request{
			Config: &criv1.ContainerConfig{
				Linux: &criv1.LinuxContainerConfig{SecurityContext: &criv1.LinuxContainerSecurityContext{Privileged: tt.privileged}},
				Mounts: []*criv1.Mount{
					{ContainerPath: "/asked", HostPath: at("asked"), SelinuxRelabel: true}, {ContainerPath: "/other", HostPath: at("other")},
				},
			},
			SELinux: tt.options, Files: pod.SandboxFiles{Hosts: at("hosts"), ResolvConf: at("resolv")},
		})
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(l.relabelled)
		if diff := cmp.Diff(tt.want, l.relabelled); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
