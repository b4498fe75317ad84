package limited

import (
	"math"
	"testing"
	"time"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	imagev1 "github.com/crisp-cri/crisp/proto/gen/crisp/image/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
)

func TestLimitOf(t *testing.T) {
	stop := containerv1.ContainerService_StopContainer_FullMethodName
	exec := containerv1.ContainerService_ExecSync_FullMethodName
	for _, tt := range []struct {
		method string
		req    any
		want   time.Duration
	}{
		{sandboxv1.SandboxService_PrepareSandbox_FullMethodName, nil, 4 * time.Minute},
		{sandboxv1.SandboxService_GetSandbox_FullMethodName, nil, 2 * time.Minute},
		{imagev1.ImageService_PullImage_FullMethodName, nil, 0},
		{stop, &containerv1.StopContainerRequest{}, 2 * time.Minute},
		{stop, &containerv1.StopContainerRequest{TimeoutSeconds: 30}, 2*time.Minute + 30*time.Second},
		{exec, &containerv1.ExecSyncRequest{}, 0},
		{exec, &containerv1.ExecSyncRequest{TimeoutSeconds: 1}, 2*time.Minute + time.Second},
	} {
		if got := limitOf(tt.method, tt.req); got != tt.want {
			t.Errorf("limitOf(%s, %v) = %s, want %s", tt.method, tt.req, got, tt.want)
		}
	}
	forever := limitOf(stop, &containerv1.StopContainerRequest{TimeoutSeconds: math.MaxInt64})
	if forever < 290*365*24*time.Hour {
		t.Errorf("the longest timeout gives %s, want centuries", forever)
	}
}
