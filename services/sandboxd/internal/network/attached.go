package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/pkg/atomicfile"
	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/version"
	"google.golang.org/protobuf/encoding/protojson"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/network/hostport"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/network/runtimeconf"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// rememberedSuffix ends the names of files that tell what a pod was attached with.
const rememberedSuffix = ".json"

// record is what is kept of an attached pod: in the file that is written before the first
// plugin runs, and, without Netns and Config, in the result of Attach.
type record struct {
	Attachments []attachment `json:"attachments"`
	// Netns and Config are of the request; Config has only what plugins are told.
	Netns  string      `json:"netns,omitempty"`
	Config *podRequest `json:"config,omitempty"`
}

// podRequest is a pod's configuration, which has a JSON form of its own.
type podRequest struct{ *criv1.PodSandboxConfig }

func (p podRequest) MarshalJSON() ([]byte, error) { return protojson.Marshal(p.PodSandboxConfig) }

func (p *podRequest) UnmarshalJSON(raw []byte) error {
	p.PodSandboxConfig = &criv1.PodSandboxConfig{}
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(raw, p.PodSandboxConfig)
}

func parseRecord(raw []byte) (record, error) {
	var rec record
	err := json.Unmarshal(raw, &rec)
	if err != nil {
		return record{}, fmt.Errorf("result of an earlier attachment: %w: %w", errdefs.ErrDataLoss, err)
	}
	if rec.Config == nil {
		rec.Config = &podRequest{}
	}
	return rec, nil
}

// remember writes down what a pod is about to be attached with.
func (c *CNI) remember(req pod.NetworkRequest, networks []network) error {
	path, err := c.attachedFile(req.SandboxID)
	if err != nil {
		return err
	}
	rec := record{Attachments: []attachment{}, Netns: req.NetnsPath, Config: &podRequest{runtimeconf.Told(req.Config)}}
	for _, n := range networks {
		a, err := newAttachment(n, nil)
		if err != nil {
			return err
		}
		rec.Attachments = append(rec.Attachments, a)
	}
	encoded, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := atomicfile.New(path, 0o600)
	if err != nil {
		return err
	}
	if _, err := f.Write(encoded); err != nil {
		return errors.Join(err, f.Cancel())
	}
	return f.Close()
}

// forget removes what was remembered, and gives up the host ports.
func (c *CNI) forget(sandboxID string) error {
	path, err := c.attachedFile(sandboxID)
	if err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	c.ports.Release(sandboxID)
	return nil
}

// sweep removes temporary files of a process that was killed while it remembered. Nothing
// may be attached meanwhile.
func (c *CNI) sweep() error {
	dir := filepath.Join(c.cfg.StateDir, "attached")
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if filepath.Ext(e.Name()) != rememberedSuffix {
			errs = append(errs, os.Remove(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// rememberedIDs are the pods for which something is remembered.
func (c *CNI) rememberedIDs() ([]string, error) {
	files, err := filepath.Glob(filepath.Join(c.cfg.StateDir, "attached", "*"+rememberedSuffix))
	ids := make([]string, 0, len(files))
	for _, f := range files {
		ids = append(ids, strings.TrimSuffix(filepath.Base(f), rememberedSuffix))
	}
	return ids, err
}

// recall reads what is remembered of a pod.
func (c *CNI) recall(sandboxID string) (record, error) {
	path, err := c.attachedFile(sandboxID)
	if err != nil {
		return record{}, err
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return record{}, err
	}
	return parseRecord(raw)
}

// attachedTo returns the networks that a pod was attached to: the ones of the result, else
// the ones that were remembered. Errors: fs.ErrNotExist if neither is there.
func (c *CNI) attachedTo(sandboxID string, raw []byte) ([]network, error) {
	rec, err := c.recordOf(sandboxID, raw)
	if err != nil {
		return nil, err
	}
	networks := make([]network, 0, len(rec.Attachments))
	for _, a := range rec.Attachments {
		n, err := a.network()
		if err != nil {
			return nil, fmt.Errorf("result of an earlier attachment: %w: %w", err, errdefs.ErrDataLoss)
		}
		networks = append(networks, n)
	}
	return networks, nil
}

func (c *CNI) recordOf(sandboxID string, raw []byte) (record, error) {
	if len(raw) == 0 {
		return c.recall(sandboxID)
	}
	return parseRecord(raw)
}

// network returns the network of an attachment. Its plugins find the result of the ADD in
// their configuration, as CNI 0.4 asks for, whatever became of the library's own cache.
func (a attachment) network() (network, error) {
	list, err := libcni.NetworkConfFromBytes(a.Config)
	if err != nil {
		return network{}, err
	}
	knowsResults, err := version.GreaterThanOrEqualTo(list.CNIVersion, "0.4.0")
	if err != nil {
		return network{}, err
	}
	if len(a.Result) > 0 && knowsResults {
		for i, p := range list.Plugins {
			list.Plugins[i], err = libcni.InjectConf(p, map[string]any{"prevResult": a.Result})
			if err != nil {
				return network{}, err
			}
		}
	}
	return network{IfName: a.IfName, List: list}, nil
}

func (c *CNI) attachedFile(sandboxID string) (string, error) {
	name := sandboxID + rememberedSuffix
	if sandboxID == "" || !filepath.IsLocal(name) || filepath.Base(name) != name {
		return "", fmt.Errorf("sandbox id %q: %w", sandboxID, errdefs.ErrInvalidArgument)
	}
	return filepath.Join(c.cfg.StateDir, "attached", name), nil
}

// recallPorts finds the ports of pods that were attached before the process started.
func (c *CNI) recallPorts(ctx context.Context) {
	ids, err := c.rememberedIDs()
	if err != nil {
		c.log.WarnContext(ctx, "host ports of pods are not known", slog.Any("error", err))
	}
	for _, id := range ids {
		rec, err := c.recall(id)
		if err != nil {
			c.log.WarnContext(ctx, "host ports of a pod are not known", slog.String("sandbox_id", id), slog.Any("error", err))
			continue
		}
		ports, err := hostport.Mappings(rec.Config.GetPortMappings())
		if err != nil || len(ports) == 0 || len(rec.Attachments) == 0 {
			continue // was refused, or has none
		}
		c.ports.Add(id, rec.Config.GetMetadata(), ports)
	}
}
