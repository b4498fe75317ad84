package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/pkg/atomicfile"
	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/version"
)

// remember writes down what a pod is about to be attached with.
func (c *CNI) remember(sandboxID string, networks []network) error {
	path, err := c.attachedFile(sandboxID)
	if err != nil {
		return err
	}
	var rec record
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

// forget removes what was remembered.
func (c *CNI) forget(sandboxID string) error {
	path, err := c.attachedFile(sandboxID)
	if err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
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
		if filepath.Ext(e.Name()) != ".json" {
			errs = append(errs, os.Remove(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// attachedTo returns the networks that a pod was attached to: the ones of the result, else
// the ones that were remembered, else those of the present configuration, because a DEL too
// many does no harm and one too few loses addresses.
func (c *CNI) attachedTo(sandboxID string, raw []byte) ([]network, error) {
	if len(raw) == 0 {
		path, err := c.attachedFile(sandboxID)
		if err != nil {
			return nil, err
		}
		raw, err = os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			networks, err := c.current()
			if err != nil {
				return nil, nil //nolint:nilerr // never attached, and there is nothing to ask
			}
			return networks, nil
		}
		if err != nil {
			return nil, err
		}
	}
	var rec record
	if err := json.Unmarshal(raw, &rec); err != nil {
		return nil, fmt.Errorf("result of an earlier attachment: %w: %w", err, errdefs.ErrDataLoss)
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
	name := sandboxID + ".json"
	if sandboxID == "" || !filepath.IsLocal(name) || filepath.Base(name) != name {
		return "", fmt.Errorf("sandbox id %q: %w", sandboxID, errdefs.ErrInvalidArgument)
	}
	return filepath.Join(c.cfg.StateDir, "attached", name), nil
}
