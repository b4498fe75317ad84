package containerevents

import (
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// stage is how far the life of a container or sandbox was told. It only grows.
type stage int

const (
	unborn stage = iota
	created
	started
	stopped
	deleted
)

// index is what followers know already. One goroutine at a time uses it.
type index struct {
	containers map[string]*container
	sandboxes  map[string]*sandbox
}

type container struct {
	sandboxID string
	stage     stage
}

type sandbox struct {
	stage stage
	// status is the last one that sandboxd gave, for what is told after the removal.
	status *criv1.PodSandboxStatus
}

func newIndex(sandboxes []*criv1.PodSandbox, containers []*criv1.Container) *index {
	ix := &index{
		containers: make(map[string]*container, len(containers)),
		sandboxes:  make(map[string]*sandbox, len(sandboxes)),
	}
	for _, s := range sandboxes {
		at := started
		if s.GetState() != criv1.PodSandboxState_SANDBOX_READY {
			at = stopped
		}
		ix.sandboxes[s.GetId()] = &sandbox{stage: at, status: listed(s)}
	}
	for _, c := range containers {
		ix.containers[c.GetId()] = &container{sandboxID: c.GetPodSandboxId(), stage: reached(c.GetState())}
	}
	return ix
}

// listed is what a list says of a sandbox, in the form of a status.
func listed(s *criv1.PodSandbox) *criv1.PodSandboxStatus {
	return &criv1.PodSandboxStatus{
		Id: s.GetId(), Metadata: s.GetMetadata(), State: criv1.PodSandboxState_SANDBOX_NOTREADY, CreatedAt: s.GetCreatedAt(),
		Labels: s.GetLabels(), Annotations: s.GetAnnotations(), RuntimeHandler: s.GetRuntimeHandler(),
	}
}

// reached is the stage that a state shows.
func reached(state criv1.ContainerState) stage {
	switch state {
	case criv1.ContainerState_CONTAINER_CREATED:
		return created
	case criv1.ContainerState_CONTAINER_RUNNING:
		return started
	default:
		return stopped
	}
}

// step is a change that is news: what to tell, of which sandbox.
type step struct {
	sandboxID string
	stage     stage
	// container is nil for a change of the sandbox itself.
	container *container
	sandbox   *sandbox
}

// step says what a change is to followers; false if it is no news to them.
func (ix *index) step(change Change) (step, bool) {
	switch change.Kind {
	case SandboxStarted, SandboxStopped, SandboxDeleted:
		s := ix.sandboxes[change.ID]
		if s == nil && change.Kind == SandboxStarted {
			s = &sandbox{}
		}
		to := sandboxStage(change.Kind)
		return step{sandboxID: change.ID, stage: to, sandbox: s}, s != nil && s.stage < to
	default:
		c := ix.containers[change.ID]
		if c == nil && change.Kind == ContainerCreated && change.SandboxID != "" {
			c = &container{sandboxID: change.SandboxID}
		}
		to := containerStage(change.Kind)
		if c == nil || c.stage >= to {
			return step{}, false
		}
		return step{sandboxID: c.sandboxID, stage: to, container: c, sandbox: ix.sandboxes[c.sandboxID]}, true
	}
}

// told notes that a step was handed to the followers.
func (ix *index) told(id string, s step, status *criv1.PodSandboxStatus) {
	if s.sandbox != nil && status != nil {
		s.sandbox.status = status
	}
	switch {
	case s.container != nil && s.stage == deleted:
		delete(ix.containers, id)
	case s.container != nil:
		s.container.stage = s.stage
		ix.containers[id] = s.container
	case s.stage == deleted:
		delete(ix.sandboxes, id)
	default:
		s.sandbox.stage = s.stage
		ix.sandboxes[id] = s.sandbox
	}
}

func containerStage(kind Kind) stage {
	switch kind {
	case ContainerCreated:
		return created
	case ContainerStarted:
		return started
	case ContainerStopped:
		return stopped
	case ContainerDeleted:
		return deleted
	default:
		return unborn
	}
}

func sandboxStage(kind Kind) stage {
	switch kind {
	case SandboxStarted:
		return started
	case SandboxStopped:
		return stopped
	default:
		return deleted
	}
}
