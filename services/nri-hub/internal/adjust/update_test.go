package adjust_test

import (
	"errors"
	"testing"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/adjust"
)

func update(id string, r *nri.LinuxResources) *nri.ContainerUpdate {
	return &nri.ContainerUpdate{ContainerId: id, Linux: &nri.LinuxContainerUpdate{Resources: r}}
}

func optional(u *nri.ContainerUpdate) *nri.ContainerUpdate {
	u.IgnoreFailure = true
	return u
}

func shares(n uint64) *nri.LinuxResources {
	return &nri.LinuxResources{Cpu: &nri.LinuxCPU{Shares: nri.UInt64(n)}}
}

func pids(n int64) *nri.LinuxResources { return &nri.LinuxResources{Pids: &nri.LinuxPids{Limit: n}} }

func TestOthersMerge(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name     string
		a, b     []*nri.ContainerUpdate
		want     []*nri.ContainerUpdate
		conflict bool
	}{
		{
			name: "different containers",
			a:    []*nri.ContainerUpdate{update("c1", shares(1))},
			b:    []*nri.ContainerUpdate{update("c2", shares(2))},
			want: []*nri.ContainerUpdate{update("c1", shares(1)), update("c2", shares(2))},
		},
		{
			name: "different fields of one container",
			a:    []*nri.ContainerUpdate{update("c1", shares(1))},
			b:    []*nri.ContainerUpdate{update("c1", pids(7))},
			want: []*nri.ContainerUpdate{update("c1", &nri.LinuxResources{
				Cpu: &nri.LinuxCPU{Shares: nri.UInt64(uint64(1))}, Pids: &nri.LinuxPids{Limit: 7},
			})},
		},
		{
			name:     "same field",
			a:        []*nri.ContainerUpdate{update("c1", pids(1))},
			b:        []*nri.ContainerUpdate{update("c1", pids(2))},
			conflict: true,
		},
		{
			name: "conflict in an update that may fail",
			a:    []*nri.ContainerUpdate{update("c1", shares(1))},
			b: []*nri.ContainerUpdate{
				optional(update("c1", &nri.LinuxResources{Pids: &nri.LinuxPids{Limit: 2}, Cpu: shares(3).Cpu})),
				update("c1", pids(9)),
			},
			want: []*nri.ContainerUpdate{update("c1", &nri.LinuxResources{
				Cpu: &nri.LinuxCPU{Shares: nri.UInt64(uint64(1))}, Pids: &nri.LinuxPids{Limit: 9},
			})},
		},
		{
			name: "may fail only if all say so",
			a:    []*nri.ContainerUpdate{optional(update("c1", shares(1))), optional(update("c2", shares(1)))},
			b:    []*nri.ContainerUpdate{update("c1", pids(1)), optional(update("c2", pids(1)))},
			want: []*nri.ContainerUpdate{
				update("c1", &nri.LinuxResources{Cpu: shares(1).Cpu, Pids: pids(1).Pids}),
				optional(update("c2", &nri.LinuxResources{Cpu: shares(1).Cpu, Pids: pids(1).Pids})),
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			o := adjust.NewOthers()
			if err := o.Apply("10-a", tt.a, nil); err != nil {
				t.Fatal(err)
			}
			err := o.Apply("20-b", tt.b, nil)
			if tt.conflict {
				if !errors.Is(err, errdefs.ErrConflict) {
					t.Fatalf("error is %v, want a conflict", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, o.Updates(), protocmp.Transform()); diff != "" {
				t.Errorf("updates (-want +got):\n%s", diff)
			}
		})
	}
}

func TestUpdateResponse(t *testing.T) {
	t.Parallel()
	req := &nri.UpdateContainerRequest{
		Container: &nri.Container{Id: "c0"},
		LinuxResources: &nri.LinuxResources{
			Cpu:            &nri.LinuxCPU{Shares: nri.UInt64(uint64(5)), Cpus: "0"},
			Pids:           &nri.LinuxPids{Limit: 3},
			HugepageLimits: []*nri.HugepageLimit{{PageSize: "1G", Limit: 1}},
		},
	}
	u := adjust.NewUpdate(req)
	if got := u.Response().GetUpdate(); len(got) != 0 {
		t.Errorf("untouched: %v, want no update", got)
	}
	first := &nri.UpdateContainerResponse{Update: []*nri.ContainerUpdate{
		update("c0", &nri.LinuxResources{Cpu: &nri.LinuxCPU{Cpus: "1"}}), update("c1", shares(1)),
	}}
	second := &nri.UpdateContainerResponse{
		Update: []*nri.ContainerUpdate{update("c0", &nri.LinuxResources{
			Pids: &nri.LinuxPids{Limit: 8}, HugepageLimits: []*nri.HugepageLimit{{PageSize: "1G", Limit: 2}},
		})},
		Evict: []*nri.ContainerEviction{{ContainerId: "c9", Reason: "full"}, {ContainerId: "c9", Reason: "again"}},
	}
	if err := u.Apply("10-a", first); err != nil {
		t.Fatal(err)
	}
	if got := u.Request().GetLinuxResources().GetCpu().GetCpus(); got != "1" {
		t.Errorf("later plugins see cpus %q, want 1", got)
	}
	if err := u.Apply("20-b", second); err != nil {
		t.Fatal(err)
	}
	want := &nri.UpdateContainerResponse{
		Update: []*nri.ContainerUpdate{update("c1", shares(1)), update("c0", &nri.LinuxResources{
			Cpu:            &nri.LinuxCPU{Shares: nri.UInt64(uint64(5)), Cpus: "1"},
			Pids:           &nri.LinuxPids{Limit: 8},
			HugepageLimits: []*nri.HugepageLimit{{PageSize: "1G", Limit: 2}},
		})},
		Evict: []*nri.ContainerEviction{{ContainerId: "c9", Reason: "full"}},
	}
	if diff := cmp.Diff(want, u.Response(), protocmp.Transform()); diff != "" {
		t.Errorf("response (-want +got):\n%s", diff)
	}
	if req.GetLinuxResources().GetCpu().GetCpus() != "0" {
		t.Error("the request was changed")
	}
}

func TestCreateRefusesToTouchTheNewContainer(t *testing.T) {
	t.Parallel()
	for name, resp := range map[string]*nri.CreateContainerResponse{
		"update":   {Update: []*nri.ContainerUpdate{update("ctr0", shares(1))}},
		"eviction": {Evict: []*nri.ContainerEviction{{ContainerId: "ctr0"}}},
	} {
		if err := adjust.NewCreate(request()).Apply("10-a", resp); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("%s: error is %v, want FailedPrecondition", name, err)
		}
	}
	c := adjust.NewCreate(request())
	resp := &nri.CreateContainerResponse{
		Update: []*nri.ContainerUpdate{update("c1", shares(1))},
		Evict:  []*nri.ContainerEviction{{ContainerId: "c2"}},
	}
	if err := c.Apply("10-a", resp); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(resp, c.Response(), protocmp.Transform()); diff != "" {
		t.Errorf("response (-want +got):\n%s", diff)
	}
}
