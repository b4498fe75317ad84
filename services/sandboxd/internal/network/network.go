// Package network attaches pods to their networks with CNI plugins.
//
// It runs ADD when a pod comes and DEL when it goes, each within its own time limit; a DEL
// is never cut short by the deadline of whoever asked for it. What a pod was attached with
// is written down before the first plugin runs, so that its DEL gets the same configuration
// even if the configuration folder has changed, an ADD failed half way, or the daemon was
// restarted. The loopback interface is not a plugin's business: it is up before a pod gets
// here. All methods may be called concurrently.
package network

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/namespaces"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/network/hostport"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/network/plugin"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/network/runtimeconf"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Ways to choose a pod's primary address.
const (
	PreferIPv4 = "ipv4" // the first IPv4 address
	PreferIPv6 = "ipv6" // the first IPv6 address
	PreferCNI  = "cni"  // the first address of the CNI result
)

// Config says where plugins and their configuration are.
type Config struct {
	// Folder has the configurations of all pods but those of runtime handlers with their own.
	Folder

	// Handlers are the handlers that have their own; see [CNI.Configure].
	Handlers Handlers
	// BinDirs hold the plugins.
	BinDirs []string
	// Template is a file from which a configuration is made once the node's pod CIDR is
	// known; empty for none.
	Template string
	// StateDir keeps what pods were attached with. It must survive a reboot as long as the
	// plugins' own state does.
	StateDir string
	// IPPreference is one of the Prefer constants; empty means PreferIPv4.
	IPPreference string
	// Timeout bounds every ADD and every DEL of a pod.
	Timeout time.Duration
	// MaxParallel bounds how many plugins attach at the same time, and how many detach; 0
	// means no bound.
	MaxParallel int64
	// CollectInterval is the time between two collections of what no pod holds; 0 means that
	// nothing is collected.
	CollectInterval time.Duration
	// StatusGrace is how long plugins that were well may say otherwise before the network is not
	// ready.
	StatusGrace time.Duration
}

// CNI runs CNI plugins. Its configuration is read by [CNI.Run].
type CNI struct {
	cfg Config
	lib *libcni.CNIConfig
	// probe runs plugins that neither attach nor detach, and so do not wait for those that do.
	probe  *libcni.CNIConfig
	gate   gate
	ports  hostport.Ports
	log    *slog.Logger
	tracer trace.Tracer

	// node is the folder of handlers without one of their own.
	node Folder
	// changed is ready when other networks are configured, again when other folders are.
	changed, again chan struct{}

	// mu guards what follows.
	mu       sync.Mutex
	handlers Handlers
	folders  map[Folder]*folder
}

// network is a configured network and the interface that a pod has in it.
type network struct {
	IfName string
	List   *libcni.NetworkConfigList
}

// New returns a CNI with the configuration that is there now. A missing or wrong one is not
// an error; [CNI.Ready] tells.
func New(ctx context.Context, cfg Config, log *slog.Logger, tracer trace.Tracer) *CNI {
	results := filepath.Join(cfg.StateDir, "results")
	c := &CNI{
		cfg:     cfg,
		lib:     libcni.NewCNIConfigWithCacheDir(cfg.BinDirs, results, plugin.New(cfg.MaxParallel, log)),
		probe:   libcni.NewCNIConfigWithCacheDir(cfg.BinDirs, results, plugin.New(0, log)),
		gate:    newGate(),
		log:     log,
		tracer:  tracer,
		node:    cfg.Folder,
		changed: make(chan struct{}, 1),
		again:   make(chan struct{}, 1),
	}
	c.Configure(cfg.Handlers)
	c.recallPorts(ctx)
	return c
}

// Attach runs ADD for every network. After an error plugins may still hold resources: the
// caller owes a Detach. Errors: ErrInvalidArgument for a bad port mapping or bandwidth,
// ErrFailedPrecondition for a host port that another pod has, ErrUnavailable without a network configuration and for failing plugins,
// context.DeadlineExceeded when the plugins took too long.
func (c *CNI) Attach(ctx context.Context, req pod.NetworkRequest) (pod.NetworkResult, error) {
	ctx, span := c.tracer.Start(ctx, "network.attach", trace.WithAttributes(attribute.String("sandbox_id", req.SandboxID)))
	defer span.End()
	result, err := c.attach(ctx, req)
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
		return pod.NetworkResult{}, err
	}
	return result, nil
}

func (c *CNI) attach(ctx context.Context, req pod.NetworkRequest) (pod.NetworkResult, error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	networks, capabilities, err := c.admit(req)
	if err != nil {
		// Nothing is attached, and a DEL of what never was might touch what others have.
		return pod.NetworkResult{}, fmt.Errorf("network of sandbox %q: %w", req.SandboxID, errors.Join(err, c.remember(req, nil)))
	}
	err = c.remember(req, networks)
	if err == nil {
		err = c.gate.enter(ctx)
	}
	if err != nil {
		return pod.NetworkResult{}, fmt.Errorf("network of sandbox %q: %w", req.SandboxID, err)
	}
	defer c.gate.leave()
	results, err := c.addAll(ctx, req, networks, capabilities)
	if err != nil {
		return pod.NetworkResult{}, fmt.Errorf("network of sandbox %q: %w", req.SandboxID, err)
	}
	ips := addresses(results[0], c.cfg.IPPreference)
	if len(ips) == 0 {
		return pod.NetworkResult{}, fmt.Errorf("network %q gave sandbox %q no address: %w",
			networks[0].List.Name, req.SandboxID, errdefs.ErrUnavailable)
	}
	c.warnOfUnmapped(ctx, req, networks)
	rec := record{}
	for i, n := range networks {
		a, err := newAttachment(n, results[i])
		if err != nil {
			return pod.NetworkResult{}, err
		}
		rec.Attachments = append(rec.Attachments, a)
	}
	encoded, err := json.Marshal(rec)
	if err != nil {
		return pod.NetworkResult{}, err
	}
	return pod.NetworkResult{IPs: ips, Raw: encoded}, nil
}

// addAll runs ADD for every network and returns the results in their order.
func (c *CNI) addAll(ctx context.Context, req pod.NetworkRequest, networks []network, capabilities map[string]any) ([]*types100.Result, error) {
	results := make([]*types100.Result, len(networks))
	// The networks of a pod do not depend on each other. One that fails does not stop the
	// others: a plugin that is killed half way leaves more behind than one that ends.
	var g errgroup.Group
	for i, n := range networks {
		g.Go(func() error {
			raw, err := c.lib.AddNetworkList(ctx, n.List, runtimeconf.For(req, n.IfName, req.NetnsPath, capabilities))
			if err == nil {
				results[i], err = types100.NewResultFromResult(raw)
			}
			if err != nil {
				return failed(ctx, n.List.Name, err)
			}
			return nil
		})
	}
	return results, g.Wait()
}

// warnOfUnmapped tells of host ports that no plugin of the networks is told of. That is no
// error: some networks see to host ports by themselves.
func (c *CNI) warnOfUnmapped(ctx context.Context, req pod.NetworkRequest, networks []network) {
	mapped := func(n network) bool {
		return slices.ContainsFunc(n.List.Plugins, func(p *libcni.PluginConfig) bool { return p.Network.Capabilities["portMappings"] })
	}
	ports, err := hostport.Mappings(req.Config.GetPortMappings())
	if err == nil && len(ports) > 0 && !slices.ContainsFunc(networks, mapped) {
		c.log.WarnContext(ctx, "no plugin with the capability portMappings is configured for the host ports of a pod",
			slog.String("sandbox_id", req.SandboxID), slog.Any("ports", ports))
	}
}

// admit says which networks a pod is attached to, and with what, and reserves its host ports.
func (c *CNI) admit(req pod.NetworkRequest) ([]network, map[string]any, error) {
	networks, err := c.current(req.Handler)
	if err != nil {
		return nil, nil, err
	}
	capabilities, err := runtimeconf.Capabilities(req.Config)
	if err != nil {
		return nil, nil, err
	}
	ports, err := hostport.Mappings(req.Config.GetPortMappings())
	if err == nil {
		err = c.ports.Claim(req.SandboxID, req.Config.GetMetadata(), ports)
	}
	return networks, capabilities, err
}

// failed names the network and gives the error of its plugins a class.
func failed(ctx context.Context, name string, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("network %q: %w: %w", name, err, cause)
	}
	return fmt.Errorf("network %q: %w: %w", name, err, errdefs.ErrUnavailable)
}

// Detach runs DEL for every network that the pod was or may have been attached to, the last
// one first, also when its namespace is gone. raw is the result of Attach if there is one.
// A network that fails does not keep the others from being detached. Detach is idempotent;
// after an error it must be repeated. Errors: as Attach.
func (c *CNI) Detach(ctx context.Context, req pod.NetworkRequest, raw []byte) error {
	ctx, span := c.tracer.Start(ctx, "network.detach", trace.WithAttributes(attribute.String("sandbox_id", req.SandboxID)))
	defer span.End()
	// Whoever asks may have no time left; what is not detached would be lost for good.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.cfg.Timeout)
	defer cancel()
	err := c.gate.enter(ctx)
	if err == nil {
		defer c.gate.leave()
		err = c.detach(ctx, req, raw)
	}
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
		return fmt.Errorf("network of sandbox %q: %w", req.SandboxID, err)
	}
	return nil
}

func (c *CNI) detach(ctx context.Context, req pod.NetworkRequest, raw []byte) error {
	networks, err := c.attachedTo(req.SandboxID, raw)
	if errors.Is(err, fs.ErrNotExist) {
		// A DEL too many does no harm, and one too few loses addresses. Without networks there
		// is nothing to ask.
		networks, _ = c.current(req.Handler)
		err = nil
	}
	if err != nil {
		return err
	}
	netns := req.NetnsPath
	if !namespaces.IsNamespace(netns) {
		netns = "" // the way CNI says that it is gone
	}
	// Wrong arguments cannot have been attached with.
	capabilities, err := runtimeconf.Capabilities(req.Config)
	if err != nil {
		capabilities = nil
	}
	var errs []error
	for _, n := range slices.Backward(networks) {
		if err := c.lib.DelNetworkList(ctx, n.List, runtimeconf.For(req, n.IfName, netns, capabilities)); err != nil {
			errs = append(errs, failed(ctx, n.List.Name, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return c.forget(req.SandboxID)
}

// addresses returns the addresses of a result, the primary one first.
func addresses(result *types100.Result, preference string) []string {
	var all []netip.Addr
	for _, ip := range result.IPs {
		addr, ok := netip.AddrFromSlice(ip.Address.IP)
		if !ok {
			continue
		}
		if addr = addr.Unmap(); !slices.Contains(all, addr) {
			all = append(all, addr)
		}
	}
	primary := 0
	if preference != PreferCNI {
		primary = max(0, slices.IndexFunc(all, func(a netip.Addr) bool { return a.Is6() == (preference == PreferIPv6) }))
	}
	out := make([]string, 0, len(all))
	for i, a := range all {
		if i == primary {
			out = slices.Insert(out, 0, a.String())
		} else {
			out = append(out, a.String())
		}
	}
	return out
}

// attachment is what a pod was attached with to one network.
type attachment struct {
	IfName string          `json:"ifName"`
	Config json.RawMessage `json:"config"`
	Result json.RawMessage `json:"result,omitempty"`
}

func newAttachment(n network, result *types100.Result) (attachment, error) {
	a := attachment{IfName: n.IfName, Config: n.List.Bytes}
	if result == nil {
		return a, nil
	}
	var out bytes.Buffer
	if err := result.PrintTo(&out); err != nil {
		return attachment{}, err
	}
	a.Result = out.Bytes()
	return a, nil
}
