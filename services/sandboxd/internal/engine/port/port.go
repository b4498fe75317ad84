// Package port declares what the engine needs of the world outside: images, networks,
// namespaces, shims, streams, specifications. Adapters implement these interfaces and know
// nothing else of the engine; the use cases know nothing else of the adapters.
//
// Implementations are safe for concurrent use. They return errdefs errors; each method says
// which ones have a meaning to the engine. Calls end with their context.
package port

import (
	"context"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	nri "github.com/containerd/nri/pkg/api"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Images finds images on the node.
type Images interface {
	// Resolve finds an image by id, digest or name. Errors: ErrNotFound, ErrInvalidArgument.
	Resolve(ctx context.Context, ref string) (pod.Image, error)
	// Unpack makes sure that a snapshotter (empty for the default one) has an image's layers
	// and returns the image as it is there. Errors: ErrNotFound.
	Unpack(ctx context.Context, img pod.Image, snapshotter string) (pod.Image, error)
}

// ImageVolumes mounts images on the node as read-only folders, for containers to mount.
type ImageVolumes interface {
	// Mount shows an image to a container, seen through ids, and returns the path of what
	// subPath names inside. The containers of a sandbox share one mount of an image.
	// Errors: ErrNotFound for a missing image, ErrInvalidArgument for a bad sub path.
	Mount(ctx context.Context, sandboxID, containerID string, img pod.Image, ids pod.IDMap, subPath string) (path string, err error)
	// Release takes back what Mount gave a container, or without one everything of the
	// sandbox. What is gone already is not an error.
	Release(ctx context.Context, sandboxID, containerID string) error
	// Holders lists the containers that hold image volumes, by sandbox.
	Holders() (map[string][]string, error)
}

// Rootfs makes and removes the root file systems of containers.
type Rootfs interface {
	// Prepare makes the writable layer named key on top of an image, seen through ids, and
	// returns how to mount it. Preparing a key twice returns the same layer.
	Prepare(ctx context.Context, key string, img pod.Image, ids pod.IDMap) ([]mount.Mount, error)
	// Mounts returns how to mount a prepared layer. Errors: ErrNotFound.
	Mounts(ctx context.Context, key, snapshotter string) ([]mount.Mount, error)
	// Remove removes a layer; an unknown one is not an error.
	Remove(ctx context.Context, key, snapshotter string) error
	// Accounts reads the user and group files of an image, cached by its chain id.
	Accounts(ctx context.Context, img pod.Image) (pod.Accounts, error)
	// FillVolumes copies folders of the image below a layer into empty ones of the node, by
	// the path in the image. A folder that is filled already is left alone.
	FillVolumes(ctx context.Context, key, snapshotter string, folders map[string]string) error
	// Usage returns the bytes and inodes of a writable layer.
	Usage(ctx context.Context, key, snapshotter string) (bytes, inodes uint64, err error)
	// Diff writes what a container changed in its root file system as a tar archive. Errors:
	// ErrNotFound.
	Diff(ctx context.Context, key, snapshotter string, w io.Writer) error
	// Apply makes the changes that Diff wrote in a layer that is not in use. Errors:
	// ErrNotFound.
	Apply(ctx context.Context, key, snapshotter string, changes io.Reader) error
	// Keys lists the writable layers of containers, for the removal of orphans.
	Keys(ctx context.Context) (map[string][]string, error) // snapshotter → keys
}

// Network attaches sandboxes to pod networks by CNI.
type Network interface {
	// Attach runs ADD for every network. After an error plugins may still hold resources:
	// the caller owes a Detach.
	Attach(ctx context.Context, req pod.NetworkRequest) (pod.NetworkResult, error)
	// Detach runs DEL for every network, also when the namespace is gone. It is idempotent.
	Detach(ctx context.Context, req pod.NetworkRequest, raw []byte) error
	// Ready says whether a usable network configuration is loaded, and why not.
	Ready() error
	// SetPodCIDR fills the configuration template, if there is one.
	SetPodCIDR(ctx context.Context, cidr string) error
	// Dial connects to a TCP port on the loopback interface of a network namespace
	// (IPv4, then IPv6); an empty path means the host's.
	Dial(ctx context.Context, netnsPath string, port int) (net.Conn, error)
}

// Namespaces pins namespaces of a pod by bind mounts, so that no process has to live in them.
type Namespaces interface {
	// Pin makes the wanted namespaces for a sandbox and returns their paths by OCI type
	// ("network", "ipc", "uts"). Namespaced sysctls and the host name are set inside.
	Pin(ctx context.Context, sandboxID string, want PinRequest) (map[string]string, error)
	// SetInterfaces sets the sysctls of interfaces, once the network is attached.
	SetInterfaces(sandboxID string, want PinRequest) error
	// Unpin removes them; what is gone already is not an error.
	Unpin(ctx context.Context, sandboxID string) error
	// List returns the ids of the sandboxes that have pinned namespaces.
	List() ([]string, error)
}

// PinRequest says which namespaces a pod needs.
type PinRequest struct {
	Network, IPC, UTS bool
	Hostname          string
	Sysctls           map[string]string
	// UIDs and GIDs map a user namespace that owns the others; empty means none.
	UIDs, GIDs []*criv1.IDMapping
}

// Files makes the files of a pod that its containers mount.
type Files interface {
	// Make writes hosts, hostname and resolv.conf and mounts /dev/shm for a sandbox.
	Make(ctx context.Context, sandboxID string, cfg *criv1.PodSandboxConfig) (pod.SandboxFiles, error)
	// Paths returns what Make made, after a restart.
	Paths(sandboxID string, cfg *criv1.PodSandboxConfig) pod.SandboxFiles
	// Remove removes them; what is gone already is not an error.
	Remove(ctx context.Context, sandboxID string) error
	// CheckLogs says whether the folder of a pod's logs is one or could be made, and makes none.
	// Errors: ErrFailedPrecondition.
	CheckLogs(cfg *criv1.PodSandboxConfig) error
}

// SandboxSpec is what a controller needs to make a sandbox.
type SandboxSpec struct {
	ID         string
	Handler    pod.Handler
	Config     *criv1.PodSandboxConfig
	Namespaces map[string]string // pinned namespaces by OCI type
	// Init is the OCI specification of the pod's own init process; nil if it has none
	// (it has one only for a shared PID namespace).
	Init []byte
	// InitRootfs are the mounts of the init's root file system.
	InitRootfs []mount.Mount
}

// Instance is a started sandbox.
type Instance struct {
	// Pid of the pod's own init process; 0 if it has none.
	Pid       uint32
	CreatedAt time.Time
}

// ControllerStatus is what a controller knows of a sandbox.
type ControllerStatus struct {
	Alive    bool // the shim answers
	Pid      uint32
	ShimPid  uint32
	ExitedAt time.Time
	Info     map[string]string // verbose only
}

// Controller is the sandbox controller interface. NotFound from Stop and Status means that
// the sandbox is gone; callers take it as an idempotent answer.
type Controller interface {
	Create(ctx context.Context, spec SandboxSpec) error
	Start(ctx context.Context, id string) (Instance, error)
	Platform(ctx context.Context, id string) (ocispec.Platform, error)
	Stop(ctx context.Context, id string, timeout time.Duration) error
	// Wait returns when the sandbox's shim or its init process has ended.
	Wait(ctx context.Context, id string) (pod.Exit, error)
	Status(ctx context.Context, id string, verbose bool) (ControllerStatus, error)
	// Shutdown ends the shim and removes everything that the controller holds for the
	// sandbox, also when the shim is dead. An unknown id is not an error.
	Shutdown(ctx context.Context, id string) error
	Metrics(ctx context.Context, id string) (*anypb.Any, error)
	Update(ctx context.Context, id string, resources *specs.LinuxResources, annotations map[string]string) error
}

// TaskSpec is what a shim needs to create a container's task.
type TaskSpec struct {
	SandboxID   string
	ContainerID string
	Handler     pod.Handler
	Spec        []byte // OCI specification in JSON
	Rootfs      []mount.Mount
	Stdio       pod.Stdio
	// Checkpoint is the folder of a checkpoint that the first process is restored from, by
	// Start; until then it has no process id. Empty for a process that begins anew.
	Checkpoint string
}

// CheckpointSpec says how the state of a container's processes is written.
type CheckpointSpec struct {
	// ImagePath is the folder that the state is written into; absolute.
	ImagePath string
	// WorkPath is the folder of CRIU's logs; absolute, or empty for one that is removed.
	WorkPath string
	// Exit ends the processes once their state is written; else they run on.
	Exit bool
	// OpenTCP, ExternalUnixSockets, Terminal and FileLocks allow processes that hold such.
	OpenTCP, ExternalUnixSockets, Terminal, FileLocks bool
}

// ExecSpec is a further process for a running container.
type ExecSpec struct {
	ID      string
	Process specs.Process
	Stdio   pod.Stdio
}

// TaskState is what a shim says of a process.
type TaskState struct {
	Status string // "created", "running", "stopped", "paused"
	Pid    uint32
	Exit   pod.Exit // of a stopped one
}

// Tasks drives processes through the shims of their sandboxes. An empty exec id means the
// container's first process. Errors: ErrNotFound for an unknown process, ErrUnavailable
// while a shim does not answer.
type Tasks interface {
	Create(ctx context.Context, spec TaskSpec) (pid uint32, err error)
	Start(ctx context.Context, sandboxID, containerID, execID string) (pid uint32, err error)
	Exec(ctx context.Context, sandboxID, containerID string, spec ExecSpec) error
	// Wait blocks until the process has ended. A shim that dies does not make it fail: the
	// exit is then what the shim saved or its clean-up found out, else code 137 or 255.
	// It fails only with ErrNotFound or when ctx ends.
	Wait(ctx context.Context, sandboxID, containerID, execID string) (pod.Exit, error)
	Kill(ctx context.Context, sandboxID, containerID, execID string, sig syscall.Signal, all bool) error
	// Delete removes an ended process from its shim and, for a first process, its bundle and
	// root mount. It works on dead shims too. ErrNotFound means it is done already.
	Delete(ctx context.Context, sandboxID, containerID, execID string) (pod.Exit, error)
	// Clear ends and removes what is left of a container, or of a pod's own process, that its
	// shim should have removed and did not: what runs in its cgroup, the cgroup, and what the
	// handler's OCI runtime keeps of it. A cgroup that does not name the id is left alone.
	// Nothing being left is not an error; what cannot be removed is one until it can be.
	Clear(ctx context.Context, handler pod.Handler, id, cgroupsPath string) error
	State(ctx context.Context, sandboxID, containerID, execID string) (TaskState, error)
	Pids(ctx context.Context, sandboxID, containerID string) ([]uint32, error)
	ResizePty(ctx context.Context, sandboxID, containerID, execID string, size pod.TerminalSize) error
	CloseIO(ctx context.Context, sandboxID, containerID, execID string) error
	Update(ctx context.Context, sandboxID, containerID string, resources *specs.LinuxResources, annotations map[string]string) error
	Stats(ctx context.Context, sandboxID, containerID string) (*anypb.Any, error)
	Pause(ctx context.Context, sandboxID, containerID string) error
	Resume(ctx context.Context, sandboxID, containerID string) error
	// CheckpointReady says why a handler's containers cannot be checkpointed or restored on
	// this node. Errors: ErrFailedPrecondition.
	CheckpointReady(ctx context.Context, handler pod.Handler) error
	// Checkpoint writes the state of a running or paused container's processes. Errors:
	// ErrNotImplemented for options that the shim does not know.
	Checkpoint(ctx context.Context, sandboxID, containerID string, spec CheckpointSpec) error
}

// IOSpec says how a container's streams are connected.
type IOSpec struct {
	SandboxID string // whose shim opens the streams
	LogDir    string // the pod's folder of logs, which the log does not leave
	LogPath   string // empty for no log
	// Running says that the container runs already. What it writes is lost rather than held
	// up if its log cannot be opened.
	Running          bool
	Terminal         bool
	Stdin, StdinOnce bool
}

// IO connects the streams of processes with logs and clients.
type IO interface {
	// Open makes the container's FIFOs, or finds them after a restart, and pumps its output
	// into the log until both ends are closed.
	Open(ctx context.Context, containerID string, spec IOSpec) (pod.Stdio, error)
	// ReopenLog opens the log file anew. No file is made if it fails.
	ReopenLog(ctx context.Context, containerID string) error
	// Attach connects a client until the container's output ends, the client's stdin and the
	// context end. CloseStdin of a container with StdinOnce is done by the IO.
	Attach(ctx context.Context, containerID string, streams pod.Streams) error
	// Drain waits, bounded by ctx, until all output was written after the process has ended.
	Drain(ctx context.Context, containerID string) error
	// Close ends the pumps and removes the FIFOs; an unknown id is not an error.
	Close(ctx context.Context, containerID string) error
	// OpenExec makes the FIFOs of an exec and connects the client.
	OpenExec(ctx context.Context, containerID, execID string, terminal bool, streams pod.Streams) (ExecIO, error)
}

// ExecIO is the IO of one exec.
type ExecIO interface {
	Stdio() pod.Stdio
	// StdinDone is closed when the client's input has ended and all of it was written.
	StdinDone() <-chan struct{}
	// Drain waits, bounded by ctx, until all output has reached the client.
	Drain(ctx context.Context) error
	// Close ends the copying and removes the FIFOs.
	Close() error
}

// SpecInput is everything that a container's OCI specification is made from.
type SpecInput struct {
	SandboxID, ContainerID string
	Sandbox                *criv1.PodSandboxConfig
	Container              *criv1.ContainerConfig
	Image                  pod.Image
	Accounts               pod.Accounts
	Handler                pod.Handler
	Namespaces             map[string]string // pinned namespaces by OCI type
	SandboxPid             uint32            // of the pod's init, for a shared PID namespace
	TargetPid              uint32            // of the container to share the PID namespace with
	Files                  pod.SandboxFiles
	Volumes                []*criv1.Mount // volumes that the image declares
	// ImageMounts are the paths on the node of images that are mounted as volumes, by
	// container path.
	ImageMounts map[string]string
	// PodLabel is the SELinux label of the pod; empty for none.
	PodLabel string
}

// SpecResult is what building a specification found out.
type SpecResult struct {
	User *criv1.ContainerUser
	// Undo takes back what building changed on the node; never nil.
	Undo func()
}

// Specs makes and changes OCI specifications and NRI's views of objects. All pure.
type Specs interface {
	// Container builds a container's specification. Errors: ErrInvalidArgument naming the
	// field, ErrFailedPrecondition for what the node cannot do.
	Container(ctx context.Context, in SpecInput) (*specs.Spec, SpecResult, error)
	// Init builds the specification of the pod's own init process.
	Init(in SpecInput) (*specs.Spec, error)
	// Exec derives the process of an exec from a container's specification.
	// handler is that of its pod.
	Exec(spec *specs.Spec, cmd []string, tty bool, handler pod.Handler) specs.Process
	// PinRequest says which namespaces a pod needs. It refuses a sandbox configuration that
	// the node cannot do.
	PinRequest(cfg *criv1.PodSandboxConfig) (PinRequest, error)
	// PodLabel gives a pod its SELinux label, empty for none. FreeLabel gives it up, KeepLabel
	// takes one that an earlier process gave.
	PodLabel(cfg *criv1.PodSandboxConfig) (string, error)
	KeepLabel(label string) error
	FreeLabel(label string)
	// Adjust returns the specification with an NRI adjustment; the one that is given stays.
	Adjust(spec *specs.Spec, adj *nri.ContainerAdjustment) (*specs.Spec, error)
	// Merge returns the resources in force after an update; zero fields mean unchanged.
	Merge(current, update *criv1.LinuxContainerResources) *criv1.LinuxContainerResources
	// MergeNRI is Merge for an update by an NRI plugin.
	MergeNRI(current *criv1.LinuxContainerResources, update *nri.LinuxResources) *criv1.LinuxContainerResources
	// SetResources writes resources and an OOM score adjustment other than zero into a
	// specification, over them what a plugin wants (nil for nothing), and returns what a
	// runtime's update call needs, and what it needs to take that back.
	SetResources(spec *specs.Spec, r *criv1.LinuxContainerResources, plugin *nri.LinuxResources) (change, undo *specs.LinuxResources, err error)
	// Limits are resources of CRI as a runtime's update call needs them.
	Limits(r *criv1.LinuxContainerResources) (*specs.LinuxResources, error)
	// Resources reads back the resources that a specification has.
	Resources(spec *specs.Spec) *criv1.LinuxContainerResources
	// Pod and Container are NRI's views.
	PodView(s *recordv1.Sandbox) *nri.PodSandbox
	ContainerView(c *recordv1.Container, spec *specs.Spec) *nri.Container
}

// Programs looks at programs before they run, and at what their processes take.
type Programs interface {
	// Check says why the program of a created container, whose first process is pid, cannot
	// be run, as far as that is certain: an OCI runtime finds out when it cannot tell any
	// more. Errors: ErrFailedPrecondition naming the file.
	Check(containerID string, pid uint32, process *specs.Process) error
	// CheckExec says why a command cannot be run in a container whose first process is pid, as far
	// as that is certain. Errors: ErrFailedPrecondition.
	CheckExec(containerID string, pid uint32, process *specs.Process) error
	// Heeds says whether a signal would do anything to a process, which without a handler
	// it does not to the first one of a process namespace. What cannot be judged heeds.
	Heeds(pid uint32, sig syscall.Signal) bool
}

// Cgroups reads and changes what runs in cgroups.
type Cgroups interface {
	// OOMKills returns how many processes of a cgroup the kernel killed for lack of memory;
	// 0 if the cgroup is gone.
	OOMKills(cgroupsPath string) uint64
	// Sets returns the processors and the memory nodes that a cgroup may use, as lists in the
	// kernel's form; empty if the cgroup is gone or has no such limits.
	Sets(cgroupsPath string) (cpus, mems string)
	// SetOOMScore changes the OOM score adjustment of a container's processes that have the
	// value from. Errors: ErrInvalidArgument for a cgroup that is not the container's own.
	SetOOMScore(ctx context.Context, id, cgroupsPath string, from, to int) error
}
