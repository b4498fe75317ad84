package rules

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/containerd/containerd/api/types"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// idForm is the form of the ids of sandboxes and containers.
var idForm = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Short names of the record states.
const (
	preparing = recordv1.SandboxState_SANDBOX_STATE_PREPARING
	ready     = recordv1.SandboxState_SANDBOX_STATE_READY
	stopping  = recordv1.SandboxState_SANDBOX_STATE_STOPPING
	stopped   = recordv1.SandboxState_SANDBOX_STATE_STOPPED

	created = recordv1.ContainerState_CONTAINER_STATE_CREATED
	running = recordv1.ContainerState_CONTAINER_STATE_RUNNING
	exited  = recordv1.ContainerState_CONTAINER_STATE_EXITED
	unknown = recordv1.ContainerState_CONTAINER_STATE_UNKNOWN
)

// IsID says whether a text has the form of the id of a sandbox or container.
func IsID(s string) bool { return idForm.MatchString(s) }

// Validate checks the rules that records follow whatever the machine does.
func Validate(rec Records) []Finding {
	var r report
	for bucket, keys := range rec.Broken {
		for _, key := range keys {
			r.add("record.unreadable", key, "the record in %s cannot be decoded", bucket)
		}
	}
	names := map[string]string{}
	sandboxes := map[string]*recordv1.Sandbox{}
	for _, s := range rec.Sandboxes {
		sandboxes[s.GetId()] = s
		r.sandbox(s)
		m := s.GetConfig().GetMetadata()
		r.unique(names, fmt.Sprintf("sandbox %s/%s/%s attempt %d", m.GetNamespace(), m.GetName(), m.GetUid(), m.GetAttempt()), s.GetId())
	}
	for _, c := range rec.Containers {
		r.container(c, sandboxes[c.GetSandboxId()])
		m := c.GetConfig().GetMetadata()
		r.unique(names, fmt.Sprintf("container %s attempt %d in %s", m.GetName(), m.GetAttempt(), c.GetSandboxId()), c.GetId())
	}
	for _, n := range rec.Releases {
		if !IsID(n.GetSandboxId()) {
			r.add("release.id", n.GetSandboxId(), "the id is not 64 hexadecimal characters")
		}
		if s := sandboxes[n.GetSandboxId()]; s != nil {
			r.add("release.sandbox", n.GetSandboxId(), "the network is owed though the sandbox still has a record (%s)", SandboxState(s))
		}
	}
	for _, e := range rec.Events {
		r.event(e)
	}
	return r
}

func (r *report) unique(names map[string]string, name, id string) {
	if other, taken := names[name]; taken {
		r.add("record.name", id, "%s also names %s", name, other)
	}
	names[name] = id
}

func (r *report) sandbox(s *recordv1.Sandbox) {
	id := s.GetId()
	m := s.GetConfig().GetMetadata()
	switch {
	case !IsID(id):
		r.add("sandbox.id", id, "the id is not 64 hexadecimal characters")
	case m.GetName() == "" || m.GetNamespace() == "" || m.GetUid() == "":
		r.add("sandbox.config", id, "the metadata is incomplete")
	}
	if s.GetCreatedAt() == nil || s.GetBootId() == "" {
		r.add("sandbox.times", id, "no creation time or boot id")
	}
	if isBefore(s.GetExitedAt(), s.GetCreatedAt()) {
		r.add("sandbox.times", id, "ended before it was created")
	}
	for _, ip := range s.GetIps() {
		if _, err := netip.ParseAddr(ip); err != nil {
			r.add("sandbox.network", id, "%q is not an address", ip)
		}
	}
	switch s.GetState() {
	case preparing:
	case ready, stopping:
		r.networked(s)
	case stopped:
		if s.GetNetworkAttached() {
			r.add("sandbox.network", id, "is stopped and still attached to its network")
		}
		if s.GetExitedAt() == nil {
			r.add("sandbox.times", id, "is stopped and has no end")
		}
	default:
		r.add("sandbox.state", id, "state %d is unknown", s.GetState())
	}
}

// networked checks that a committed sandbox has the network that its configuration asks for.
func (r *report) networked(s *recordv1.Sandbox) {
	own := ownNetwork(s)
	if own && !filepath.IsAbs(s.GetNetnsPath()) {
		r.add("sandbox.network", s.GetId(), "is %s and has no network namespace", SandboxState(s))
	}
	if own != s.GetNetworkAttached() {
		r.add("sandbox.network", s.GetId(), "is %s, attached %t, own network wanted %t", SandboxState(s), s.GetNetworkAttached(), own)
	}
	if s.GetNetnsPath() != s.GetNamespaces()["network"] {
		r.add("sandbox.network", s.GetId(), "network namespace is %q in one place and %q in another", s.GetNetnsPath(), s.GetNamespaces()["network"])
	}
}

// ownNetwork says whether a pod has a network namespace of its own.
func ownNetwork(s *recordv1.Sandbox) bool {
	return s.GetConfig().GetLinux().GetSecurityContext().GetNamespaceOptions().GetNetwork() != criv1.NamespaceMode_NODE
}

func (r *report) container(c *recordv1.Container, s *recordv1.Sandbox) {
	id := c.GetId()
	if !IsID(id) {
		r.add("container.id", id, "the id is not 64 hexadecimal characters")
	}
	if s == nil {
		r.add("container.sandbox", id, "its sandbox %q has no record", c.GetSandboxId())
	}
	if s.GetState() == preparing {
		r.add("container.sandbox", id, "its sandbox %s is not committed", c.GetSandboxId())
	}
	if c.GetConfig().GetMetadata().GetName() == "" || c.GetImageId() == "" || c.GetSnapshotter() == "" {
		r.add("container.config", id, "name, image or snapshotter is missing")
	}
	if !json.Valid(c.GetSpec()) {
		r.add("container.config", id, "the specification is not JSON")
	}
	if p := c.GetLogPath(); p != "" && !filepath.IsAbs(p) {
		r.add("container.config", id, "log path %q is not absolute", p)
	}
	if c.GetCreatedAt() == nil || isBefore(c.GetStartedAt(), c.GetCreatedAt()) || isBefore(c.GetFinishedAt(), c.GetStartedAt()) {
		r.add("container.times", id, "created %s, started %s, finished %s are not in order",
			clock(c.GetCreatedAt()), clock(c.GetStartedAt()), clock(c.GetFinishedAt()))
	}
	r.containerState(c, s)
}

func (r *report) containerState(c *recordv1.Container, s *recordv1.Sandbox) {
	id := c.GetId()
	switch c.GetState() {
	case created:
		if c.GetPid() != 0 || c.GetStartedAt() != nil || c.GetFinishedAt() != nil || c.GetTaskDeleted() {
			r.add("container.state", id, "was never started and has pid %d, start %s, end %s, task deleted %t",
				c.GetPid(), clock(c.GetStartedAt()), clock(c.GetFinishedAt()), c.GetTaskDeleted())
		}
	case running:
		if c.GetPid() == 0 || c.GetBootId() == "" || c.GetStartedAt() == nil {
			r.add("container.state", id, "runs without one of pid, boot id, start")
		}
		if c.GetFinishedAt() != nil || c.GetTaskDeleted() {
			r.add("container.state", id, "runs and has an end")
		}
		if s.GetState() == stopped {
			r.add("container.state", id, "runs in the stopped sandbox %s", c.GetSandboxId())
		}
	case exited:
		if c.GetStartedAt() == nil || c.GetFinishedAt() == nil || c.GetReason() == "" {
			r.add("container.state", id, "ended without one of start, end, reason")
		}
		if code := c.GetExitCode(); code < 0 || code > 255 {
			r.add("container.state", id, "exit code %d is impossible", code)
		}
		if s.GetState() == stopped && !c.GetTaskDeleted() {
			r.add("container.state", id, "its sandbox is stopped and its task is not deleted")
		}
	case unknown:
	default:
		r.add("container.state", id, "state %s is never recorded", ContainerState(c))
	}
}

func (r *report) event(e store.Entry) {
	id := fmt.Sprintf("entry %d", e.Sequence)
	var env types.Envelope
	switch {
	case e.Event == nil:
		r.add("outbox.event", id, "cannot be decoded")
	case e.Event.GetMessageId() == "" || !strings.HasPrefix(e.Event.GetTopic(), "/"):
		r.add("outbox.event", id, "message id %q, topic %q", e.Event.GetMessageId(), e.Event.GetTopic())
	case proto.Unmarshal(e.Event.GetEnvelope(), &env) != nil || env.GetEvent() == nil:
		r.add("outbox.event", id, "the envelope cannot be decoded")
	case env.GetTopic() != e.Event.GetTopic():
		r.add("outbox.event", id, "topic %q in the entry, %q in the envelope", e.Event.GetTopic(), env.GetTopic())
	}
}

// isBefore compares two times that may be absent.
func isBefore(a, b *timestamppb.Timestamp) bool {
	return a != nil && b != nil && a.AsTime().Before(b.AsTime())
}

func clock(t *timestamppb.Timestamp) string {
	if t == nil {
		return "-"
	}
	return t.AsTime().Format("2006-01-02T15:04:05.000000Z")
}

// SandboxState is the name of a sandbox's state, such as READY.
func SandboxState(s *recordv1.Sandbox) string {
	return strings.TrimPrefix(s.GetState().String(), "SANDBOX_STATE_")
}

// ContainerState is the name of a container's state, such as RUNNING.
func ContainerState(c *recordv1.Container) string {
	return strings.TrimPrefix(c.GetState().String(), "CONTAINER_STATE_")
}
