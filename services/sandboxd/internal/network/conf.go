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
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/template"

	"github.com/containerd/containerd/v2/pkg/atomicfile"
	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/libcni"
)

// madeFile is the name of the configuration that is made from the template.
const madeFile = "10-crisp-net.conflist"

// errNoNetwork says that a folder has no network configuration.
var errNoNetwork = errors.New("no network configuration")

// load reads the network configurations of the folder.
func load(dir string, limit int) ([]network, error) {
	files, err := libcni.ConfFiles(dir, []string{".conf", ".conflist", ".json"})
	if err != nil {
		return nil, fmt.Errorf("network configuration: %w: %w", err, errdefs.ErrUnavailable)
	}
	slices.Sort(files)
	var out []network
	for _, file := range files {
		list, err := readList(file)
		if err != nil {
			return nil, fmt.Errorf("network configuration %s: %w: %w", file, err, errdefs.ErrUnavailable)
		}
		out = append(out, network{IfName: "eth" + strconv.Itoa(len(out)), List: list})
		if len(out) == limit {
			break
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("cni plugin not initialized: %w in %s: %w", errNoNetwork, dir, errdefs.ErrUnavailable)
	}
	return out, nil
}

// readList reads a configuration file of either form. The bytes of the result are complete:
// plugins that come from files of their own are written out in it.
func readList(file string) (*libcni.NetworkConfigList, error) {
	if !strings.HasSuffix(file, ".conflist") {
		raw, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		return wrapSingle(raw)
	}
	list, err := libcni.NetworkConfFromFile(file)
	if err != nil {
		return nil, err
	}
	var whole map[string]any
	if err := json.Unmarshal(list.Bytes, &whole); err != nil {
		return nil, err
	}
	plugins := make([]json.RawMessage, 0, len(list.Plugins))
	for _, p := range list.Plugins {
		plugins = append(plugins, p.Bytes)
	}
	whole["plugins"] = plugins
	encoded, err := json.Marshal(whole)
	if err != nil {
		return nil, err
	}
	return libcni.NetworkConfFromBytes(encoded)
}

// wrapSingle makes a list of the older form, which configures one plugin.
func wrapSingle(raw []byte) (*libcni.NetworkConfigList, error) {
	var single map[string]any
	if err := json.Unmarshal(raw, &single); err != nil {
		return nil, err
	}
	if kind, _ := single["type"].(string); kind == "" {
		return nil, fmt.Errorf("no plugin type: %w", errdefs.ErrInvalidArgument)
	}
	list := map[string]any{"name": single["name"], "plugins": []any{single}}
	if v, ok := single["cniVersion"]; ok {
		list["cniVersion"] = v
	}
	encoded, err := json.Marshal(list)
	if err != nil {
		return nil, err
	}
	return libcni.NetworkConfFromBytes(encoded)
}

// templateData is what a template may use.
type templateData struct {
	PodCIDR       string
	PodCIDRRanges []string
	Routes        []string
}

// SetPodCIDR makes the configuration from the template, if there is one, unless somebody
// else's configuration is in the folder already. cidr is one range or two, separated by a
// comma. Errors: ErrInvalidArgument, ErrFailedPrecondition for a bad template and for a folder
// that cannot be written.
func (c *CNI) SetPodCIDR(ctx context.Context, cidr string) error {
	if c.cfg.Template == "" || cidr == "" {
		return nil
	}
	data, err := parseCIDRs(cidr)
	if err != nil {
		return err
	}
	foreign, err := c.foreignConfiguration()
	if err != nil {
		return err
	}
	if foreign != "" {
		c.log.InfoContext(ctx, "no network configuration is made of the template beside somebody else's", slog.String("file", foreign))
		return nil
	}
	t, err := template.ParseFiles(c.cfg.Template)
	if err != nil {
		return fmt.Errorf("network configuration template: %w: %w", errdefs.ErrFailedPrecondition, err)
	}
	var out bytes.Buffer
	if err := t.Execute(&out, data); err != nil {
		return fmt.Errorf("network configuration template: %w: %w", errdefs.ErrFailedPrecondition, err)
	}
	list, err := libcni.NetworkConfFromBytes(out.Bytes())
	if err == nil && len(list.Plugins) == 0 {
		err = errors.New("no plugins")
	}
	if err != nil {
		return fmt.Errorf("network configuration from template %s: %w: %w", c.cfg.Template, errdefs.ErrFailedPrecondition, err)
	}
	if err := writeChanged(filepath.Join(c.cfg.ConfDir, madeFile), out.Bytes()); err != nil {
		return fmt.Errorf("network configuration: %w: %w", errdefs.ErrFailedPrecondition, err)
	}
	c.reload()
	return nil
}

func parseCIDRs(cidr string) (templateData, error) {
	var data templateData
	for one := range strings.SplitSeq(cidr, ",") {
		prefix, err := netip.ParsePrefix(strings.TrimSpace(one))
		if err != nil {
			return templateData{}, fmt.Errorf("pod CIDR %q: %w: %w", one, err, errdefs.ErrInvalidArgument)
		}
		data.PodCIDRRanges = append(data.PodCIDRRanges, prefix.Masked().String())
		route := "0.0.0.0/0"
		if prefix.Addr().Is6() {
			route = "::/0"
		}
		data.Routes = append(data.Routes, route)
	}
	data.PodCIDR = data.PodCIDRRanges[0]
	return data, nil
}

// foreignConfiguration is a configuration in the folder that is not made here; empty for none.
func (c *CNI) foreignConfiguration() (string, error) {
	files, err := libcni.ConfFiles(c.cfg.ConfDir, []string{".conf", ".conflist", ".json"})
	if err != nil {
		return "", fmt.Errorf("network configuration: %w: %w", errdefs.ErrFailedPrecondition, err)
	}
	for _, f := range files {
		if filepath.Base(f) != madeFile {
			return f, nil
		}
	}
	return "", nil
}

func writeChanged(path string, content []byte) error {
	have, err := os.ReadFile(path)
	if err == nil && bytes.Equal(have, content) {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := atomicfile.New(path, 0o644)
	if err != nil {
		return err
	}
	if _, err := f.Write(content); err != nil {
		return errors.Join(err, f.Cancel())
	}
	return f.Close()
}
