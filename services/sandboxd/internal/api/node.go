package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/pelletier/go-toml/v2"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	"github.com/crisp-cri/crisp/services/internal/buildinfo"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine"
)

// inventoryChunk is the size in bytes at which a piece of the inventory is sent.
const inventoryChunk = 2 << 20

// endedChunk is how many ids of ended objects are sent in one piece.
const endedChunk = 10_000

// NetworkState is what the node handlers need of the network.
type NetworkState interface {
	Ready() error
	SetPodCIDR(ctx context.Context, cidr string) error
}

// ControlGroupsReady is a condition that is false if containers run without control groups, and is
// not there if they have them. Kubelet knows no such condition and does not heed it.
const ControlGroupsReady = "ControlGroupsReady"

// NodeConfig is what sandboxd says of the node.
type NodeConfig struct {
	// Handlers are the runtime handlers with what they can do; the default one has an
	// empty name too.
	Handlers []*criv1.RuntimeHandler
	Features *criv1.RuntimeFeatures
	// SystemdCgroup tells kubelet which cgroup driver to use.
	SystemdCgroup bool
	// NoGroups says why containers have no control groups; empty if they have.
	NoGroups string
	// Config is the configuration in force, for the verbose status.
	Config any
}

// Node serves crisp.node.v1.NodeService.
type Node struct {
	nodev1.UnsafeNodeServiceServer

	engine  *engine.Engine
	network NetworkState
	cfg     atomic.Pointer[NodeConfig]
}

// NewNode returns the service.
func NewNode(e *engine.Engine, network NetworkState, cfg NodeConfig) *Node {
	n := &Node{engine: e, network: network}
	n.Configure(cfg)
	return n
}

// Configure changes what is said of the node from now on.
func (n *Node) Configure(cfg NodeConfig) { n.cfg.Store(&cfg) }

// OpenSession implements NodeService.
func (n *Node) OpenSession(req *nodev1.OpenSessionRequest, stream grpc.ServerStreamingServer[nodev1.OpenSessionResponse]) error {
	err := required("session_token", req.GetSessionToken() != "")
	if err != nil {
		return err
	}
	ctx := stream.Context()
	hold := n.engine.EnterSession(ctx, req.GetSessionToken())
	defer hold() // until the stream ends
	return tellRecovery(ctx, n.engine.RecoveredC(), func(recovered bool) error {
		return stream.Send(&nodev1.OpenSessionResponse{Recovered: recovered})
	})
}

// tellRecovery tells whether the state is complete, and, if it is not, when it is.
func tellRecovery(ctx context.Context, recovered <-chan struct{}, tell func(recovered bool) error) error {
	select {
	case <-recovered:
		return tell(true)
	default:
	}
	err := tell(false)
	if err != nil {
		return err
	}
	select {
	case <-recovered:
		return tell(true)
	case <-ctx.Done():
		return nil
	}
}

// GetStatus implements NodeService.
func (n *Node) GetStatus(_ context.Context, req *nodev1.GetStatusRequest) (*nodev1.GetStatusResponse, error) {
	runtime := &criv1.RuntimeCondition{Type: criv1.RuntimeReady, Status: true}
	if !n.engine.Recovered() {
		runtime.Status, runtime.Reason, runtime.Message = false, "Recovering", "sandboxd is still recovering its state"
	}
	network := &criv1.RuntimeCondition{Type: criv1.NetworkReady, Status: true}
	err := n.network.Ready()
	if err != nil {
		network.Status, network.Reason, network.Message = false, "NetworkPluginNotReady", err.Error()
	}
	resp := &nodev1.GetStatusResponse{
		Conditions:      []*criv1.RuntimeCondition{runtime, network},
		RuntimeHandlers: n.cfg.Load().Handlers, Features: n.cfg.Load().Features,
	}
	if why := n.cfg.Load().NoGroups; why != "" {
		resp.Conditions = append(resp.Conditions, &criv1.RuntimeCondition{
			Type: ControlGroupsReady, Reason: "NotDelegated", Message: "containers run without control groups, that is without limits and figures of use: " + why,
		})
	}
	if req.GetVerbose() {
		text, err := n.info()
		if err != nil {
			return nil, err
		}
		resp.Info = map[string]string{"sandboxd": text}
	}
	return resp, nil
}

// info describes the process for people, in JSON: its configuration by the names of the
// file, and what it holds.
func (n *Node) info() (string, error) {
	var text bytes.Buffer
	cfg := map[string]any{}
	err := config.Dump(&text, n.cfg.Load().Config)
	if err == nil {
		err = toml.Unmarshal(text.Bytes(), &cfg)
	}
	if err != nil {
		return "", fmt.Errorf("configuration: %w", err)
	}
	said := map[string]any{"version": buildinfo.Read().Version, "recovered": n.engine.Recovered(), "config": cfg}
	if sandboxes, err := n.engine.Views.Sandboxes(); err == nil {
		said["sandboxes"] = len(sandboxes)
	}
	if containers, err := n.engine.Views.Containers(""); err == nil {
		said["containers"] = len(containers)
	}
	out, err := json.Marshal(said)
	return string(out), err
}

// GetRuntimeConfig implements NodeService. It answers before recovery is done.
func (n *Node) GetRuntimeConfig(context.Context, *nodev1.GetRuntimeConfigRequest) (*nodev1.GetRuntimeConfigResponse, error) {
	driver := criv1.CgroupDriver_CGROUPFS
	if n.cfg.Load().SystemdCgroup {
		driver = criv1.CgroupDriver_SYSTEMD
	}
	return &nodev1.GetRuntimeConfigResponse{Linux: &criv1.LinuxRuntimeConfiguration{CgroupDriver: driver}}, nil
}

// UpdateRuntimeConfig implements NodeService.
func (n *Node) UpdateRuntimeConfig(ctx context.Context, req *nodev1.UpdateRuntimeConfigRequest) (*nodev1.UpdateRuntimeConfigResponse, error) {
	cidr := req.GetConfig().GetNetworkConfig().GetPodCidr()
	if cidr == "" {
		return &nodev1.UpdateRuntimeConfigResponse{}, nil
	}
	err := n.network.SetPodCIDR(ctx, cidr)
	if err != nil && !errdefs.IsNotImplemented(err) {
		return nil, err
	}
	return &nodev1.UpdateRuntimeConfigResponse{}, nil
}

// ListInventory implements NodeService.
func (n *Node) ListInventory(_ *nodev1.ListInventoryRequest, stream grpc.ServerStreamingServer[nodev1.ListInventoryResponse]) error {
	pods, containers, ended, err := n.engine.Views.Inventory()
	if err != nil {
		return err
	}
	for chunk := range bySize(pods) {
		err := stream.Send(&nodev1.ListInventoryResponse{Pods: chunk})
		if err != nil {
			return err
		}
	}
	for chunk := range bySize(containers) {
		err := stream.Send(&nodev1.ListInventoryResponse{Containers: chunk})
		if err != nil {
			return err
		}
	}
	for ids := range slices.Chunk(ended, endedChunk) {
		if err := stream.Send(&nodev1.ListInventoryResponse{EndedIds: ids}); err != nil {
			return err
		}
	}
	return nil
}

// bySize cuts a list into pieces of about inventoryChunk bytes.
func bySize[M interface {
	proto.Message
	*nri.PodSandbox | *nri.Container
}](all []M) func(yield func([]M) bool) {
	return func(yield func([]M) bool) {
		for len(all) > 0 {
			size, n := 0, 0
			for n < len(all) && (n == 0 || size < inventoryChunk) {
				size += proto.Size(all[n])
				n++
			}
			if !yield(slices.Clip(all[:n])) {
				return
			}
			all = all[n:]
		}
	}
}
