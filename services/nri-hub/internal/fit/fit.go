// Package fit makes NRI messages small enough for their transport, which refuses
// messages of more than 4 MiB.
//
// What does not fit is given without its bulky parts rather than not at all. The
// package is pure and never changes what it is given.
package fit

import (
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
)

// MaxMessage is how large a message may be; the rest up to 4 MiB is for the frame.
const MaxMessage = 4<<20 - 64<<10

// Pod returns the pod, or a copy without annotations and labels if it is larger than
// limit bytes. slim says that something is missing.
func Pod(p *nri.PodSandbox, limit int) (out *nri.PodSandbox, slim bool) {
	if p == nil || proto.Size(p) <= limit {
		return p, false
	}
	out = proto.CloneOf(p)
	out.Annotations = nil
	if proto.Size(out) > limit {
		out.Labels = nil
	}
	return out, true
}

// Container is Pod for a container. Environment, annotations and mounts go before
// arguments, hooks and labels. The rest of a container is small.
func Container(c *nri.Container, limit int) (out *nri.Container, slim bool) {
	if c == nil || proto.Size(c) <= limit {
		return c, false
	}
	out = proto.CloneOf(c)
	for _, drop := range []func(){
		func() { out.Env, out.Annotations = nil, nil },
		func() { out.Mounts = nil },
		func() { out.Args, out.Hooks, out.Labels = nil, nil, nil },
		func() { out.Linux, out.Rlimits, out.CDIDevices = nil, nil, nil },
	} {
		drop()
		if proto.Size(out) <= limit {
			break
		}
	}
	return out, true
}

// Chunk is one message of a synchronisation.
type Chunk struct {
	Pods       []*nri.PodSandbox
	Containers []*nri.Container
	Bytes      int
}

// Chunks cuts pods and containers into messages of at most limit bytes, in order and
// pods first. There is always at least one. The ids of objects that were too large for
// a message of their own, and are given without their bulky parts, come back in slim.
func Chunks(pods []*nri.PodSandbox, containers []*nri.Container, limit int) (chunks []Chunk, slim []string) {
	// A field's tag and length take at most this much.
	const overhead = 8
	chunks = append(chunks, Chunk{})
	room := func(n int) *Chunk {
		last := &chunks[len(chunks)-1]
		if last.Bytes > 0 && last.Bytes+n > limit {
			chunks = append(chunks, Chunk{})
			last = &chunks[len(chunks)-1]
		}
		last.Bytes += n
		return last
	}
	for _, p := range pods {
		fitting, cut := Pod(p, limit-overhead)
		if cut {
			slim = append(slim, p.GetId())
		}
		c := room(proto.Size(fitting) + overhead)
		c.Pods = append(c.Pods, fitting)
	}
	for _, ctr := range containers {
		fitting, cut := Container(ctr, limit-overhead)
		if cut {
			slim = append(slim, ctr.GetId())
		}
		c := room(proto.Size(fitting) + overhead)
		c.Containers = append(c.Containers, fitting)
	}
	return chunks, slim
}

// Notice returns a notice that fits: an event after which a plugin can change nothing,
// so that it is better told of the object without its bulky parts than not at all.
// Messages of other types are returned as they are.
func Notice(m proto.Message, limit int) proto.Message {
	switch m.(type) {
	case *nri.CreateContainerRequest, *nri.UpdateContainerRequest:
		return m // no notices; what they cost counts
	}
	if proto.Size(m) <= limit {
		return m
	}
	half := limit / 2
	switch r := m.(type) {
	case *nri.StopPodSandboxRequest:
		p, _ := Pod(r.GetPod(), limit)
		return &nri.StopPodSandboxRequest{Pod: p}
	case *nri.RemovePodSandboxRequest:
		p, _ := Pod(r.GetPod(), limit)
		return &nri.RemovePodSandboxRequest{Pod: p}
	case *nri.PostUpdatePodSandboxRequest:
		p, _ := Pod(r.GetPod(), limit)
		return &nri.PostUpdatePodSandboxRequest{Pod: p}
	case *nri.PostCreateContainerRequest:
		p, c := both(r, half)
		return &nri.PostCreateContainerRequest{Pod: p, Container: c}
	case *nri.StartContainerRequest:
		p, c := both(r, half)
		return &nri.StartContainerRequest{Pod: p, Container: c}
	case *nri.PostStartContainerRequest:
		p, c := both(r, half)
		return &nri.PostStartContainerRequest{Pod: p, Container: c}
	case *nri.PostUpdateContainerRequest:
		p, c := both(r, half)
		return &nri.PostUpdateContainerRequest{Pod: p, Container: c}
	case *nri.StopContainerRequest:
		p, c := both(r, half)
		return &nri.StopContainerRequest{Pod: p, Container: c}
	case *nri.RemoveContainerRequest:
		p, c := both(r, half)
		return &nri.RemoveContainerRequest{Pod: p, Container: c}
	default:
		return m
	}
}

type subject interface {
	GetPod() *nri.PodSandbox
	GetContainer() *nri.Container
}

func both(s subject, half int) (*nri.PodSandbox, *nri.Container) {
	p, _ := Pod(s.GetPod(), half)
	c, _ := Container(s.GetContainer(), half)
	return p, c
}
