package process

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestCommand(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ command, args, entrypoint, cmd, want string }{
		{"", "", "/entry", "--a", "/entry --a"},
		{"", "--b", "/entry", "--a", "/entry --b"},
		{"/run", "", "/entry", "--a", "/run"},
		{"/run", "--b", "/entry", "--a", "/run --b"},
		{"", "", "", "/cmd x", "/cmd x"},
	} {
		config := &criv1.ContainerConfig{Command: strings.Fields(tt.command), Args: strings.Fields(tt.args)}
		got, err := command(config, strings.Fields(tt.entrypoint), strings.Fields(tt.cmd))
		if err != nil || strings.Join(got, " ") != tt.want {
			t.Errorf("%+v: %v, %v", tt, got, err)
		}
	}
}

func FuzzRecords(f *testing.F) {
	f.Add("#comment\nroot:x:0:0::/:/bin/sh\r\nbroken\n:x:1:1::/:\napp:x:1000:1004::/:/bin/sh\nneg:x:-1:0::/:\n", "app", "staff")
	f.Fuzz(func(_ *testing.T, file, user, group string) {
		a := accounts{passwd: []byte(file), group: []byte(file)}
		if _, _, login, err := a.lookUp(user, group); err == nil {
			a.groupsOf(login)
		}
	})
}

func TestExec(t *testing.T) {
	t.Parallel()
	spec := &specs.Spec{Process: &specs.Process{Args: []string{"/bin/app"}, Capabilities: &specs.LinuxCapabilities{}}}
	p := Exec(spec, []string{"sh"}, true, "")
	if !p.Terminal || p.Args[0] != "sh" || p.Env[len(p.Env)-1] != "TERM=xterm" || p.Capabilities == nil {
		t.Errorf("process %+v", p)
	}
	if spec.Process.Terminal || spec.Process.Args[0] != "/bin/app" || strings.Contains(strings.Join(spec.Process.Env, " "), "TERM") {
		t.Error("the container's own process was changed")
	}
}

func TestExecOnFirstProcessor(t *testing.T) {
	t.Parallel()
	for set, want := range map[string]string{"": "", "0-3": "0", "12": "12", "5,7": "5"} {
		spec := &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{Resources: &specs.LinuxResources{CPU: &specs.LinuxCPU{Cpus: set}}}}
		got := Exec(spec, []string{"sh"}, false, OnFirst).ExecCPUAffinity
		if (got == nil) != (want == "") || got != nil && (got.Initial != want || got.Final != want) {
			t.Errorf("%q: %+v, want %q", set, got, want)
		}
		if Exec(spec, []string{"sh"}, false, "").ExecCPUAffinity != nil {
			t.Error("an affinity that nobody asked for")
		}
	}
	if Exec(&specs.Spec{Process: &specs.Process{}}, []string{"sh"}, false, OnFirst).ExecCPUAffinity != nil {
		t.Error("an affinity without a set of processors")
	}
}

// Variables replace earlier ones of their name, whoever they come from, and what cannot be one is
// refused; a great many are put together in no time that anybody would notice.
func TestEnvironment(t *testing.T) {
	t.Parallel()
	req := Request{Hostname: "h", Env: []string{"A=node", "NONE", "=x", ""}, Config: &criv1.ContainerConfig{Tty: true, Envs: []*criv1.KeyValue{{Key: "A", Value: []byte("=pod")}}}}
	req.Image.Env = []string{"PATH=", "A=image", "B=image"}
	got, err := environment([]string{"B=base"}, req)
	if want := []string{"PATH=", "HOSTNAME=h", "TERM=xterm", "A==pod", "B=image"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
	for i := range 300_000 {
		req.Image.Env = append(req.Image.Env, fmt.Sprintf("VARIABLE%d=%d", i, i))
	}
	begun := time.Now()
	if got, err := environment(nil, req); err != nil || len(got) != 300_005 || time.Since(begun) > testkit.Patience {
		t.Errorf("%d variables in %s, %v", len(got), time.Since(begun), err)
	}
	req.Image.Env = []string{"A=b", "C=\x00"}
	if _, err := environment(nil, req); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), `"C"`) {
		t.Errorf("NUL in an image's variable: %v", err)
	}
	if _, err := workingDir("", "/a\x00"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("NUL in an image's working directory: %v", err)
	}
	if _, err := command(&criv1.ContainerConfig{}, []string{"sh", "\x00"}, nil); !errdefs.IsInvalidArgument(err) {
		t.Errorf("NUL in an image's command: %v", err)
	}
}
