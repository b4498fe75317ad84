package workload

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestCPU(t *testing.T) {
	t.Parallel()
	list := []Workload{
		{Name: "management", Activation: "target/management", Prefix: "resources", Resources: Resources{Shares: 512, Set: "0-1", Quota: 50_000}},
		{Name: "plain", Activation: "target/plain", Resources: Resources{Limit: 250, Period: 10_000}},
	}
	for name, tt := range map[string]struct {
		pod  map[string]string
		want *specs.LinuxCPU
		err  string
	}{
		"of no workload": {pod: map[string]string{"resources/app": "{"}},
		"defaults": {
			pod:  map[string]string{"target/management": "", "resources/other": "{"},
			want: &specs.LinuxCPU{Shares: new(uint64(512)), Cpus: "0-1", Quota: new(int64(50_000))},
		},
		"own": {
			pod:  map[string]string{"target/management": "x", "resources/app": `{"cpushares":2,"cpuset":"3","cpuquota":-1,"cpuperiod":20000}`},
			want: &specs.LinuxCPU{Shares: new(uint64(2)), Cpus: "3", Quota: new(int64(-1)), Period: new(uint64(20_000))},
		},
		"an own limit instead of the quota": {
			pod:  map[string]string{"target/management": "", "resources/app": `{"cpulimit":1500}`},
			want: &specs.LinuxCPU{Shares: new(uint64(512)), Cpus: "0-1", Quota: new(int64(150_000)), Period: new(uint64(100_000))},
		},
		"a limit below what the kernel accepts": {
			pod:  map[string]string{"target/management": "", "resources/app": `{"cpulimit":1}`},
			want: &specs.LinuxCPU{Shares: new(uint64(512)), Cpus: "0-1", Quota: new(int64(1000)), Period: new(uint64(100_000))},
		},
		"without a prefix": {
			pod:  map[string]string{"target/plain": "", "/app": "{"},
			want: &specs.LinuxCPU{Quota: new(int64(2500)), Period: new(uint64(10_000))},
		},
		"two":            {pod: map[string]string{"target/plain": "", "target/management": ""}, err: `"management" and "plain"`},
		"no JSON":        {pod: map[string]string{"target/management": "", "resources/app": "2"}, err: `"resources/app"`},
		"unknown":        {pod: map[string]string{"target/management": "", "resources/app": `{"memory":2}`}, err: "memory"},
		"bad set":        {pod: map[string]string{"target/management": "", "resources/app": `{"cpuset":"a"}`}, err: "cpuset"},
		"bad quota":      {pod: map[string]string{"target/management": "", "resources/app": `{"cpuquota":5}`}, err: "cpuquota"},
		"bad period":     {pod: map[string]string{"target/management": "", "resources/app": `{"cpuperiod":5}`}, err: "cpuperiod"},
		"bad shares":     {pod: map[string]string{"target/management": "", "resources/app": `{"cpushares":1}`}, err: "cpushares"},
		"negative limit": {pod: map[string]string{"target/management": "", "resources/app": `{"cpulimit":-1}`}, err: "cpulimit"},
	} {
		got, err := CPU(list, "app", tt.pod)
		if tt.err != "" {
			if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s: %v, want an error with %s", name, err, tt.err)
			}
			continue
		}
		if diff := cmp.Diff(tt.want, got); err != nil || diff != "" {
			t.Errorf("%s: %v, (-want +got):\n%s", name, err, diff)
		}
	}
}
