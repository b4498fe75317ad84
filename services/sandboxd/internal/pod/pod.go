// Package pod is the domain of sandboxd: sandboxes, containers, images and what is known
// of them, their states and the rules between the states.
//
// It holds values only. Nothing in it starts a process, opens a file or talks to another
// process, and none of its types is safe for concurrent use unless it says so.
package pod

import (
	"fmt"
	"io"
	"strings"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Namespace is the containerd namespace that shims and events are given, so that
// containerd's tools find what they expect.
const Namespace = "k8s.io"

// AnnotationSandboxID is the annotation in a bundle's config.json by which a shim groups
// containers into one process.
const AnnotationSandboxID = "io.kubernetes.cri.sandbox-id"

// AnnotationType says whether something is a pod or a container of one.
const (
	AnnotationType = "io.kubernetes.cri.container-type"
	TypeContainer  = "container"
	TypeSandbox    = "sandbox"
)

// Annotations are those by which shims, OCI runtimes, plugins and tools tell what belongs to a
// pod.
func Annotations(id string, meta *criv1.PodSandboxMetadata) map[string]string {
	return map[string]string{
		AnnotationSandboxID:                   id,
		"io.kubernetes.cri.sandbox-name":      meta.GetName(),
		"io.kubernetes.cri.sandbox-namespace": meta.GetNamespace(),
		"io.kubernetes.cri.sandbox-uid":       meta.GetUid(),
	}
}

// Reasons of an ended container, in the words that kubelet knows.
const (
	ReasonCompleted  = "Completed"
	ReasonError      = "Error"
	ReasonOOMKilled  = "OOMKilled"
	ReasonStartError = "StartError"
	ReasonUnknown    = "Unknown"
)

// Exit codes with a meaning of their own.
const (
	// ExitCodeStartError is the code of a container whose first process never ran.
	ExitCodeStartError = 128
	// ExitCodeKilled is the code of a process that SIGKILL ended.
	ExitCodeKilled = 128 + 9
	// ExitCodeUnknown is the code of a container whose end nobody saw.
	ExitCodeUnknown = 255
)

// Sandboxers are the kinds of sandbox controllers, as Handler.Sandboxer names them.
const (
	// SandboxerPodsandbox works with every shim; an empty name means the same.
	SandboxerPodsandbox = "podsandbox"
	// SandboxerShim works with shims that serve the sandbox API.
	SandboxerShim = "shim"
)

// Image is an image of the node as the engine needs it.
type Image struct {
	// ID is the digest of the image's configuration, "sha256:…".
	ID string
	// Ref is a digest reference "name@sha256:…", or the ID if the image has none.
	Ref string
	// Name is the reference that the caller gave, normalised.
	Name string
	// ChainID is the name of the snapshot of the topmost layer.
	ChainID string
	// Snapshotter holds the unpacked layers.
	Snapshotter string
	// Config is the configuration part of the image configuration.
	Config ocispec.ImageConfig
}

// IDMap says which ids of the node the ids in a user namespace are. The zero value is for
// what has no user namespace.
type IDMap struct {
	UIDs, GIDs []*criv1.IDMapping
}

// IsZero says whether nothing is mapped.
func (m IDMap) IsZero() bool { return len(m.UIDs) == 0 && len(m.GIDs) == 0 }

// String is the mapping as "container id:node id:length,…;…", users first.
func (m IDMap) String() string {
	if m.IsZero() {
		return ""
	}
	return MappingText(m.UIDs) + ";" + MappingText(m.GIDs)
}

// MappingText writes mappings as "container id:node id:length", with commas between them.
func MappingText(list []*criv1.IDMapping) string {
	texts := make([]string, 0, len(list))
	for _, m := range list {
		texts = append(texts, fmt.Sprintf("%d:%d:%d", m.GetContainerId(), m.GetHostId(), m.GetLength()))
	}
	return strings.Join(texts, ",")
}

// IDMapOf is the mapping of a pod's user namespace.
func IDMapOf(cfg *criv1.PodSandboxConfig) IDMap {
	user := cfg.GetLinux().GetSecurityContext().GetNamespaceOptions().GetUsernsOptions()
	if user.GetMode() != criv1.NamespaceMode_POD {
		return IDMap{}
	}
	return IDMap{UIDs: user.GetUids(), GIDs: user.GetGids()}
}

// Accounts are the user and group files of an image, already read with care: bounded in
// size and resolved inside the image's root. A missing file is empty.
type Accounts struct {
	// Passwd is the content of /etc/passwd.
	Passwd []byte
	// Group is the content of /etc/group.
	Group []byte
}

// Handler is a configured runtime handler (RuntimeClass) with everything that it needs.
type Handler struct {
	// Name is the handler's name in the configuration.
	Name string
	// RuntimeType is the shim's type, such as "io.containerd.runc.v2".
	RuntimeType string
	// ShimPath is the shim's binary; empty means it is found by its type.
	ShimPath string
	// BinaryName is the OCI runtime that a runc-like shim drives; empty for its default.
	BinaryName string
	// Root is the OCI runtime's state folder; empty for the shim's default.
	Root string
	// SystemdCgroup selects the systemd cgroup driver.
	SystemdCgroup bool
	// Options are further shim options, passed as they are (TOML) to shims that are not
	// runc-like.
	Options map[string]any
	// Sandboxer selects the controller: "podsandbox" or "shim".
	Sandboxer string
	// Snapshotter for root file systems; empty for the node's default.
	Snapshotter string
	// PodAnnotations and ContainerAnnotations are patterns (path.Match) of annotations
	// that are passed through to the OCI specification.
	PodAnnotations       []string
	ContainerAnnotations []string
	// DefaultAnnotations are in the OCI specification unless an annotation that is passed
	// through has another value.
	DefaultAnnotations map[string]string
	// PrivilegedWithoutHostDevices keeps host devices out of privileged containers.
	PrivilegedWithoutHostDevices bool
	// AllDevicesAllowed lets privileged containers use all devices all the same, through
	// nodes that they make themselves.
	AllDevicesAllowed bool
	// CgroupWritable mounts the cgroups of containers that are not privileged writable.
	CgroupWritable bool
	// ExecCPUAffinity is "first" if what is executed in a container shall run on the first
	// processor of its set; empty for all of them.
	ExecCPUAffinity string
	// BaseSpec is the path of an OCI specification that every container starts from;
	// empty for the built-in one.
	BaseSpec string
}

// Stdio are the standard streams that a shim connects a process to.
type Stdio struct {
	// Stdin, Stdout and Stderr are FIFO paths or URIs; empty means none.
	Stdin, Stdout, Stderr string
	// Terminal says that the process has a terminal; Stderr is then empty.
	Terminal bool
}

// Exit is the end of a process.
type Exit struct {
	// Pid is the process id it had.
	Pid uint32
	// Code is the exit code, 128 plus the signal for a killed process.
	Code uint32
	// At is when it ended.
	At time.Time
	// Unknown says that nobody saw the end; the code is then ExitCodeUnknown. A process may
	// also end with that code by itself.
	Unknown bool
}

// Streams are the ends of a client that is connected to a process. A nil stream is not
// connected. Closing is the caller's business.
type Streams struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
}

// TerminalSize is the size of a terminal in characters.
type TerminalSize struct {
	Width, Height uint32
}

// SandboxFiles are the files that the runtime makes for a pod and mounts into its
// containers. Paths are absolute; an empty one is not mounted.
type SandboxFiles struct {
	Hosts, Hostname, ResolvConf, Shm string
}

// NetworkRequest is what is needed to attach a sandbox to its networks, and, after any
// restart, to detach it again.
type NetworkRequest struct {
	// SandboxID is the CNI container id.
	SandboxID string
	// Config is the sandbox's configuration: metadata, port mappings, annotations, DNS.
	Config *criv1.PodSandboxConfig
	// NetnsPath is the pinned network namespace.
	NetnsPath string
	// Handler is the name of the runtime handler.
	Handler string
}

// NetworkHolder is a sandbox that is attached to networks or may be.
type NetworkHolder struct {
	SandboxID string
	// Raw is the CNI result, if there is one.
	Raw []byte
}

// NetworkResult is what attaching gave.
type NetworkResult struct {
	// IPs are the pod's addresses, the primary one first.
	IPs []string
	// Raw is the CNI result in JSON; kept for the teardown and for the verbose status.
	Raw []byte
}

// ShortID is a name for humans and logs: the first 13 characters of an id.
func ShortID(id string) string {
	if len(id) > 13 {
		return id[:13]
	}
	return id
}
