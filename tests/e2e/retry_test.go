//go:build integration

package e2e

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// A caller that gives up does not stop the work, and its retry joins it.
func TestRetryOfRunPodSandboxJoinsTheFirst(t *testing.T) {
	s := start(t, testenv.Setup{})
	must(t, s.SlowNetwork(2*time.Second))
	config := s.podConfig("joined")
	run := func(d time.Duration) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		defer cancel()
		answer, err := s.CRI.RunPodSandbox(ctx, &criv1.RunPodSandboxRequest{Config: config})
		return answer.GetPodSandboxId(), err
	}
	if _, err := run(300 * time.Millisecond); status.Code(err) != codes.DeadlineExceeded {
		t.Fatalf("first call: %v, want DeadlineExceeded", err)
	}
	if pods := s.crictl("pods", "-q"); pods != "" {
		t.Errorf("the unfinished pod is listed: %q", pods)
	}
	var wg sync.WaitGroup
	ids := make([]string, 3)
	for i := range ids {
		wg.Go(func() {
			id, err := run(30 * time.Second)
			if err != nil {
				t.Errorf("retry %d: %v", i, err)
			}
			ids[i] = id
		})
	}
	wg.Wait()
	if ids[0] != ids[1] || ids[1] != ids[2] {
		t.Errorf("retries got different sandboxes: %v", ids)
	}
	again, err := run(30 * time.Second)
	if err != nil || again != ids[0] {
		t.Errorf("a call after the end got %q, %v; want %q", again, err, ids[0])
	}
	calls, err := s.NetworkCalls()
	must(t, err)
	adds := 0
	for _, call := range calls {
		if strings.HasPrefix(call, "ADD:") {
			adds++
		}
	}
	if adds != 1 {
		t.Errorf("the network was attached %d times: %v", adds, calls)
	}
}

// A pod whose caller is gone for good is complete, and can be found and removed.
func TestWorkOutlivesItsCaller(t *testing.T) {
	s := start(t, testenv.Setup{})
	must(t, s.SlowNetwork(time.Second))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := s.CRI.RunPodSandbox(ctx, &criv1.RunPodSandboxRequest{Config: s.podConfig("left-alone")})
	if status.Code(err) != codes.DeadlineExceeded {
		t.Fatalf("%v, want DeadlineExceeded", err)
	}
	eventually(t, "the pod becomes ready", func() error {
		if out := s.crictl("pods", "--state", "ready", "-q"); out == "" {
			return context.DeadlineExceeded
		}
		return nil
	})
}
