package sequence

import (
	"context"
	"fmt"
	"log/slog"

	nri "github.com/containerd/nri/pkg/api"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/operation"
)

// RunPodSandbox makes a sandbox and returns its id. A call with the key
// namespace/name/uid/attempt of one in flight joins it.
func (s *Sequences) RunPodSandbox(ctx context.Context, req *criv1.RunPodSandboxRequest) (string, error) {
	m := req.GetConfig().GetMetadata()
	key := fmt.Sprintf("%s/%s/%s/%d", m.GetNamespace(), m.GetName(), m.GetUid(), m.GetAttempt())
	return operation.Do(ctx, s.ops, s.spec("run_pod_sandbox", key, req), func(ctx context.Context) (string, error) {
		return s.runPodSandbox(ctx, req)
	})
}

func (s *Sequences) runPodSandbox(ctx context.Context, req *criv1.RunPodSandboxRequest) (string, error) {
	id, _, err := s.makePodSandbox(ctx, req)
	return id, err
}

// makePodSandbox makes a sandbox, or finds the one that a request like this made before.
func (s *Sequences) makePodSandbox(ctx context.Context, req *criv1.RunPodSandboxRequest) (id string, existing bool, err error) {
	ctx, end := s.hub.Begin(ctx)
	defer end()
	token, err := s.session.Token(ctx)
	if err != nil {
		return "", false, err
	}
	prepared, err := s.sandboxes.PrepareSandbox(ctx, &sandboxv1.PrepareSandboxRequest{
		SessionToken:   token,
		Config:         req.GetConfig(),
		RuntimeHandler: req.GetRuntimeHandler(),
	})
	if err != nil {
		return "", false, fmt.Errorf("prepare sandbox: %w", err)
	}
	id = prepared.GetSandboxId()
	if prepared.GetExisting() {
		return id, true, nil
	}
	defer func() {
		if err != nil {
			s.undoSandbox(ctx, prepared.GetSandboxId(), prepared.GetPod())
		}
	}()
	if err := s.hub.Notify(ctx, nri.Event_RUN_POD_SANDBOX, prepared.GetPod(), nil); err != nil {
		return "", false, fmt.Errorf("sandbox %s: plugins: %w", id, err)
	}
	err = s.commit(ctx, func(token string) error {
		_, err := s.sandboxes.CommitSandbox(ctx, &sandboxv1.CommitSandboxRequest{SessionToken: token, SandboxId: id})
		return err
	})
	if err != nil {
		return "", false, fmt.Errorf("commit sandbox %s: %w", id, err)
	}
	return id, false, nil
}

// undoSandbox takes back what runPodSandbox did. The plugins are told while the pod's
// network is still there.
func (s *Sequences) undoSandbox(ctx context.Context, id string, pod *nri.PodSandbox) {
	ctx, cancel := s.undoing(ctx)
	defer cancel()
	s.tell(ctx, nri.Event_STOP_POD_SANDBOX, pod, nil)
	s.tell(ctx, nri.Event_REMOVE_POD_SANDBOX, pod, nil)
	if _, err := s.sandboxes.AbortSandbox(ctx, &sandboxv1.AbortSandboxRequest{SandboxId: id}); err != nil {
		s.log.ErrorContext(ctx, "sandbox not aborted, its session's end will do it",
			slog.String("sandbox_id", id), slog.Any("error", err))
	}
}

// StopPodSandbox stops a sandbox with all its containers. An unknown one is no error.
func (s *Sequences) StopPodSandbox(ctx context.Context, id string) error {
	_, err := operation.Do(ctx, s.ops, s.spec("stop_pod_sandbox", id, nil), func(ctx context.Context) (struct{}, error) {
		_, err := s.stopPodSandbox(ctx, id)
		return struct{}{}, err
	})
	return err
}

func (s *Sequences) stopPodSandbox(ctx context.Context, id string) (*sandboxv1.QuiesceSandboxResponse, error) {
	quiet, err := s.sandboxes.QuiesceSandbox(ctx, &sandboxv1.QuiesceSandboxRequest{SandboxId: id})
	if err != nil {
		return nil, fmt.Errorf("quiesce sandbox %s: %w", id, err)
	}
	if !quiet.GetFound() {
		return quiet, nil
	}
	for _, c := range quiet.GetContainers() {
		s.tellStopped(ctx, quiet.GetPod(), c)
	}
	s.tell(ctx, nri.Event_STOP_POD_SANDBOX, quiet.GetPod(), nil)
	stopped, err := s.sandboxes.StopSandbox(ctx, &sandboxv1.StopSandboxRequest{SandboxId: id})
	if err != nil {
		return nil, fmt.Errorf("stop sandbox %s: %w", id, err)
	}
	if stopped.GetPod() != nil {
		quiet.Pod = stopped.GetPod() // without the network that it had
	}
	return quiet, nil
}

// RemovePodSandbox stops a sandbox if needed and removes it with all its containers. An
// unknown one is no error.
func (s *Sequences) RemovePodSandbox(ctx context.Context, id string) error {
	_, err := operation.Do(ctx, s.ops, s.spec("remove_pod_sandbox", id, nil), func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.removePodSandbox(ctx, id)
	})
	return err
}

func (s *Sequences) removePodSandbox(ctx context.Context, id string) error {
	quiet, err := s.stopPodSandbox(ctx, id)
	if err != nil {
		return err
	}
	// A sandbox that is not found is removed all the same: sandboxd may hold remains
	// of it that no list shows.
	if _, err := s.sandboxes.RemoveSandbox(ctx, &sandboxv1.RemoveSandboxRequest{SandboxId: id}); err != nil {
		return fmt.Errorf("remove sandbox %s: %w", id, err)
	}
	if !quiet.GetFound() {
		return nil
	}
	for _, c := range quiet.GetContainers() {
		s.tell(ctx, nri.Event_REMOVE_CONTAINER, quiet.GetPod(), c)
	}
	s.tell(ctx, nri.Event_REMOVE_POD_SANDBOX, quiet.GetPod(), nil)
	return nil
}

// UpdatePodSandboxResources records new pod-level resources.
func (s *Sequences) UpdatePodSandboxResources(ctx context.Context, req *criv1.UpdatePodSandboxResourcesRequest) error {
	spec := s.spec("update_pod_sandbox", "", nil)
	_, err := operation.Do(ctx, s.ops, spec, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.updatePodSandbox(ctx, req)
	})
	return err
}

func (s *Sequences) updatePodSandbox(ctx context.Context, req *criv1.UpdatePodSandboxResourcesRequest) error {
	id := req.GetPodSandboxId()
	wants, err := s.hub.Wants(ctx, nri.Event_UPDATE_POD_SANDBOX)
	if err != nil {
		return fmt.Errorf("sandbox %s: plugins: %w", id, err)
	}
	if wants {
		if err := s.askPodUpdate(ctx, req); err != nil {
			return err
		}
	}
	resp, err := s.sandboxes.UpdateSandboxResources(ctx, &sandboxv1.UpdateSandboxResourcesRequest{
		SandboxId: id,
		Overhead:  req.GetOverhead(),
		Resources: req.GetResources(),
	})
	if err != nil {
		return fmt.Errorf("update sandbox %s: %w", id, err)
	}
	s.tell(ctx, nri.Event_POST_UPDATE_POD_SANDBOX, resp.GetPod(), nil)
	return nil
}

func (s *Sequences) askPodUpdate(ctx context.Context, req *criv1.UpdatePodSandboxResourcesRequest) error {
	pod, err := s.describePod(ctx, req.GetPodSandboxId())
	if err != nil {
		return err
	}
	if pod == nil {
		return nil // sandboxd says what is wrong with it
	}
	err = s.hub.UpdatePodSandbox(ctx, &nri.UpdatePodSandboxRequest{
		Pod:                    pod,
		OverheadLinuxResources: nriResources(req.GetOverhead()),
		LinuxResources:         nriResources(req.GetResources()),
	})
	if err != nil {
		return fmt.Errorf("sandbox %s: plugins: %w", pod.GetId(), err)
	}
	return nil
}

// describePod finds a pod in the inventory; nil if it is not there.
func (s *Sequences) describePod(ctx context.Context, id string) (*nri.PodSandbox, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream when the pod is found before its end
	stream, err := s.node.ListInventory(ctx, &nodev1.ListInventoryRequest{})
	if err != nil {
		return nil, fmt.Errorf("list inventory: %w", err)
	}
	var found *nri.PodSandbox
	err = eachPiece(stream, func(piece *nodev1.ListInventoryResponse) bool {
		for _, pod := range piece.GetPods() {
			if pod.GetId() == id {
				found = pod
			}
		}
		return found == nil
	})
	return found, err
}
