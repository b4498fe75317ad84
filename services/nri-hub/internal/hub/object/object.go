// Package object is what the hub knows of pods and containers: what they are, which of them
// are being made, and which are gone but perhaps still to be told of.
//
// It knows no plugins. How much each of them was told is with the plugin, in the words of
// Stage; a Ledger brings both over a restart of the hub.
package object

import (
	"maps"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// Stage is how much of an object's life a plugin has been told. Zero is nothing.
type Stage uint8

// The stages of an object's life.
const (
	Known Stage = iota + 1
	Stopped
	Removed
)

// Object is what is known of a pod or container, apart from its state.
type Object struct {
	Pod       *nri.PodSandbox
	Container *nri.Container // nil for a pod
}

// ID is that of the container, or else of the pod.
func (o Object) ID() string {
	if o.Container != nil {
		return o.Container.GetId()
	}
	return o.Pod.GetId()
}

// Slim is what is remembered of an object: enough to tell of its end.
func (o Object) Slim() Object {
	pod := &nri.PodSandbox{
		Id: o.Pod.GetId(), Name: o.Pod.GetName(), Uid: o.Pod.GetUid(), Namespace: o.Pod.GetNamespace(),
		Labels: o.Pod.GetLabels(), Annotations: o.Pod.GetAnnotations(), RuntimeHandler: o.Pod.GetRuntimeHandler(),
	}
	if o.Container == nil {
		return Object{Pod: pod}
	}
	c := o.Container
	return Object{Pod: pod, Container: &nri.Container{
		Id: c.GetId(), PodSandboxId: c.GetPodSandboxId(), Name: c.GetName(), State: nri.ContainerState_CONTAINER_STOPPED,
		Labels: c.GetLabels(), Annotations: c.GetAnnotations(),
	}}
}

// Ledger remembers over a restart of the hub which pods and containers each plugin knows,
// so that each of them hears of an object's end once, whoever was away when it came. Its
// methods are called concurrently and do not fail: what is not remembered is an end that
// is not told.
type Ledger interface {
	// Object notes what an object is; the container is nil for a pod.
	Object(pod *nri.PodSandbox, container *nri.Container)
	// Told notes how much of an object a plugin has been told.
	Told(plugin plug.ID, object string, told Stage)
}

// Past is what a ledger has remembered.
type Past struct {
	Pods       map[string]*nri.PodSandbox
	Containers map[string]*nri.Container
	Told       map[plug.ID]map[string]Stage
}

func (p Past) objects() map[string]Object {
	objects := make(map[string]Object, len(p.Pods)+len(p.Containers))
	for id, pod := range p.Pods {
		objects[id] = Object{Pod: pod}
	}
	for id, c := range p.Containers {
		objects[id] = Object{Pod: p.Pods[c.GetPodSandboxId()], Container: c}
	}
	return objects
}

// KnownBy returns what the plugins of the past were told, by plugin. The caller may change it.
func (p Past) KnownBy() map[plug.ID]map[string]Stage {
	known := make(map[plug.ID]map[string]Stage, len(p.Told))
	for id, told := range p.Told {
		known[id] = maps.Clone(told)
	}
	return known
}
