//go:build integration

package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/testenv"
)

const (
	callLimit  = 10 * time.Second
	retryPause = 100 * time.Millisecond
	retryMost  = 5 * time.Second
)

var errLost = errors.New("lost")

// kubelet calls CRI as kubelet does.
type kubelet struct {
	s       *testenv.System
	t       *testing.T
	handler string
	// step is told when a step in the life of a pod begins; the pod's id is empty before its run.
	step func(step step, pod string)
}

// step is a step in the life of a pod and its containers.
type step string

const (
	stepRun    step = "run"
	stepCreate step = "create"
	stepStart  step = "start"
	stepExec   step = "exec"
	stepStop   step = "stop"
	stepRemove step = "remove"
)

// podConfig is a pod of that name; some share their PID namespace or use the node's network.
func podConfig(s *testenv.System, name string, rng *rand.Rand) *criv1.PodSandboxConfig {
	options := &criv1.NamespaceOption{Pid: criv1.NamespaceMode_CONTAINER}
	if rng.IntN(4) == 0 {
		options.Pid = criv1.NamespaceMode_POD
	}
	if rng.IntN(6) == 0 {
		options.Network = criv1.NamespaceMode_NODE
	}
	return &criv1.PodSandboxConfig{
		Metadata:     &criv1.PodSandboxMetadata{Name: name, Uid: name + "-uid", Namespace: "chaos"},
		LogDirectory: s.Path("podlogs", name),
		Linux: &criv1.LinuxPodSandboxConfig{
			CgroupParent: s.CgroupParent(), SecurityContext: &criv1.LinuxSandboxSecurityContext{NamespaceOptions: options},
		},
	}
}

func containerConfig(name, script string) *criv1.ContainerConfig {
	return &criv1.ContainerConfig{
		Metadata: &criv1.ContainerMetadata{Name: name},
		Image:    &criv1.ImageSpec{Image: fixture.BusyboxImage},
		Command:  []string{"sh", "-c", script},
		LogPath:  name + ".log",
		Linux:    &criv1.LinuxContainerConfig{},
	}
}

// transient says whether a call was cut off rather than refused.
func transient(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Aborted, codes.Canceled:
		return true
	default:
		return false
	}
}

// retry repeats a call until it succeeds or fails for a reason that again accepts not.
func (k *kubelet) retry(ctx context.Context, what string, again func(error) bool, call func(ctx context.Context) error) error {
	for delay := retryPause; ; delay = min(2*delay, retryMost) {
		limited, cancel := context.WithTimeout(ctx, callLimit)
		err := call(limited)
		cancel()
		switch {
		case err == nil:
			return nil
		case !again(err):
			return fmt.Errorf("%s: %w", what, err)
		case !pause(ctx, delay):
			return fmt.Errorf("%s: %w after: %w", what, ctx.Err(), err)
		}
		if !transient(err) {
			k.t.Logf("%s is repeated after %v", what, err)
		}
	}
}

func always(error) bool { return true }

func (k *kubelet) runPod(ctx context.Context, config *criv1.PodSandboxConfig) (id string, err error) {
	k.step(stepRun, "")
	err = k.retry(ctx, "run pod", transient, func(ctx context.Context) error {
		answer, err := k.s.CRI.RunPodSandbox(ctx, &criv1.RunPodSandboxRequest{Config: config, RuntimeHandler: k.handler})
		id = answer.GetPodSandboxId()
		return err
	})
	if err == nil || ctx.Err() != nil {
		return id, err
	}
	// What holds the name, if anything, is stopped before the next attempt.
	listErr := k.retry(ctx, "list pods", always, func(ctx context.Context) error {
		pods, err := k.s.CRI.ListPodSandbox(ctx, &criv1.ListPodSandboxRequest{})
		for _, p := range pods.GetItems() {
			if p.GetMetadata().GetUid() == config.GetMetadata().GetUid() && p.GetMetadata().GetAttempt() == config.GetMetadata().GetAttempt() {
				id = p.GetId()
			}
		}
		return err
	})
	return id, errors.Join(err, listErr)
}

func (k *kubelet) stopPod(ctx context.Context, id string) error {
	k.step(stepStop, id)
	return k.retry(ctx, "stop pod", always, func(ctx context.Context) error {
		_, err := k.s.CRI.StopPodSandbox(ctx, &criv1.StopPodSandboxRequest{PodSandboxId: id})
		return err
	})
}

func (k *kubelet) removePod(ctx context.Context, id string) error {
	if err := k.stopPod(ctx, id); err != nil {
		return err
	}
	k.step(stepRemove, id)
	return k.retry(ctx, "remove pod", always, func(ctx context.Context) error {
		_, err := k.s.CRI.RemovePodSandbox(ctx, &criv1.RemovePodSandboxRequest{PodSandboxId: id})
		return err
	})
}

// removeAll removes all pods and checks that none is listed, nor a container.
func (k *kubelet) removeAll(ctx context.Context) error {
	var pods *criv1.ListPodSandboxResponse
	list := func(ctx context.Context) (err error) {
		pods, err = k.s.CRI.ListPodSandbox(ctx, &criv1.ListPodSandboxRequest{})
		return err
	}
	if err := k.retry(ctx, "list pods", always, list); err != nil {
		return err
	}
	problems := make(chan error, len(pods.GetItems()))
	for _, p := range pods.GetItems() {
		go func() { problems <- k.removePod(ctx, p.GetId()) }()
	}
	var errs []error
	for range pods.GetItems() {
		errs = append(errs, <-problems)
	}
	if err := k.retry(ctx, "list pods", always, list); err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, p := range pods.GetItems() {
		errs = append(errs, fmt.Errorf("pod %s (%s) is still listed as %s", p.GetId(), p.GetMetadata().GetName(), p.GetState()))
	}
	containers, err := k.s.CRI.ListContainers(ctx, &criv1.ListContainersRequest{})
	for _, c := range containers.GetContainers() {
		errs = append(errs, fmt.Errorf("container %s is still listed as %s", c.GetId(), c.GetState()))
	}
	return errors.Join(append(errs, err)...)
}

// runContainer creates and starts a container, with a new attempt whenever it is lost. The
// returned one has been started.
func (k *kubelet) runContainer(ctx context.Context, pod string, podConfig *criv1.PodSandboxConfig, config *criv1.ContainerConfig) (string, error) {
	const attempts = 5
	for attempt := range uint32(attempts) {
		config.Metadata.Attempt = attempt
		id := ""
		k.step(stepCreate, pod)
		err := k.retry(ctx, "create container", transient, func(ctx context.Context) error {
			answer, err := k.s.CRI.CreateContainer(ctx, &criv1.CreateContainerRequest{PodSandboxId: pod, Config: config, SandboxConfig: podConfig})
			id = answer.GetContainerId()
			return err
		})
		if err != nil {
			return "", err
		}
		k.step(stepStart, pod)
		err = k.startContainer(ctx, id)
		if !errors.Is(err, errLost) {
			return id, err
		}
		k.t.Logf("container %s attempt %d of pod %s: %v", config.GetMetadata().GetName(), attempt, pod, err)
	}
	return "", fmt.Errorf("container %s: %w %d times", config.GetMetadata().GetName(), errLost, attempts)
}

// startContainer starts a container. A call that was cut off may have worked: the status
// tells.
func (k *kubelet) startContainer(ctx context.Context, id string) error {
	for {
		limited, cancel := context.WithTimeout(ctx, callLimit)
		_, err := k.s.CRI.StartContainer(limited, &criv1.StartContainerRequest{ContainerId: id})
		cancel()
		if err == nil {
			return nil
		}
		status, statusErr := k.status(ctx, id)
		if statusErr != nil {
			return errors.Join(err, statusErr)
		}
		switch {
		case status.GetState() == criv1.ContainerState_CONTAINER_RUNNING:
			return nil
		case status.GetState() == criv1.ContainerState_CONTAINER_EXITED && status.GetReason() == "StartError":
			return fmt.Errorf("%w at its start: %s", errLost, status.GetMessage())
		case status.GetState() == criv1.ContainerState_CONTAINER_EXITED:
			return nil
		case !transient(err):
			return fmt.Errorf("start container: %w", err)
		}
		if !pause(ctx, retryPause) {
			return fmt.Errorf("start container: %w", err)
		}
	}
}

func (k *kubelet) status(ctx context.Context, id string) (*criv1.ContainerStatus, error) {
	var answer *criv1.ContainerStatusResponse
	err := k.retry(ctx, "container status", transient, func(ctx context.Context) (err error) {
		answer, err = k.s.CRI.ContainerStatus(ctx, &criv1.ContainerStatusRequest{ContainerId: id})
		return err
	})
	return answer.GetStatus(), err
}

func (k *kubelet) waitEnd(ctx context.Context, id string) (*criv1.ContainerStatus, error) {
	for {
		status, err := k.status(ctx, id)
		if err != nil || status.GetState() == criv1.ContainerState_CONTAINER_EXITED {
			return status, err
		}
		if !pause(ctx, retryPause) {
			return nil, fmt.Errorf("container %s is %s and does not end: %w", id, status.GetState(), ctx.Err())
		}
	}
}

// exec runs a command. It may be cut off, and must neither hang nor answer wrongly.
func (k *kubelet) exec(ctx context.Context, pod, id string) error {
	k.step(stepExec, pod)
	const limit = 5
	began := time.Now()
	limited, cancel := context.WithTimeout(ctx, 6*limit*time.Second)
	defer cancel()
	answer, err := k.s.CRI.ExecSync(limited, &criv1.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", "echo out; exit 7"}, Timeout: limit})
	if took := time.Since(began); took > 3*limit*time.Second {
		return fmt.Errorf("exec took %s and gave %w", took, err)
	}
	if err == nil && (answer.GetExitCode() != 7 || string(answer.GetStdout()) != "out\n") {
		k.t.Errorf("exec in %s: exit code %d, output %q", id, answer.GetExitCode(), answer.GetStdout())
	}
	return nil
}

func (k *kubelet) stopContainer(ctx context.Context, pod, id string, seconds int64) error {
	k.step(stepStop, pod)
	return k.retry(ctx, "stop container", always, func(ctx context.Context) error {
		_, err := k.s.CRI.StopContainer(ctx, &criv1.StopContainerRequest{ContainerId: id, Timeout: seconds})
		return err
	})
}

func (k *kubelet) removeContainer(ctx context.Context, pod, id string) error {
	k.step(stepRemove, pod)
	return k.retry(ctx, "remove container", always, func(ctx context.Context) error {
		_, err := k.s.CRI.RemoveContainer(ctx, &criv1.RemoveContainerRequest{ContainerId: id})
		return err
	})
}
