package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

// statusLimit bounds the asking of all plugins for their status.
const statusLimit = 10 * time.Second

// knows11 says whether the plugins of a network know what CNI 1.1 added: STATUS and GC.
func (n network) knows11() bool {
	ok, err := version.GreaterThanOrEqualTo(n.List.CNIVersion, "1.1.0")
	return err == nil && ok
}

// unasked is the status of networks whose plugins have not said anything yet; nil if they
// know no STATUS.
func unasked(networks []network) error {
	for _, n := range networks {
		if n.knows11() {
			return fmt.Errorf("network %q: its plugins have not said yet whether they can take pods: %w", n.List.Name, errdefs.ErrUnavailable)
		}
	}
	return nil
}

// refresh reads the configuration anew and asks its plugins for their status.
func (c *CNI) refresh(ctx context.Context) {
	before := map[Folder]error{}
	for _, f := range c.all() {
		before[f] = c.readiness(f)
	}
	c.reload()
	c.askStatus(ctx)
	for f, before := range before {
		switch after := c.readiness(f); {
		case after != nil && (before == nil || before.Error() != after.Error()):
			c.log.WarnContext(ctx, "network is not ready", slog.String("conf_dir", f.ConfDir), slog.Any("error", after))
		case after == nil && before != nil:
			c.log.InfoContext(ctx, "network is ready", slog.String("conf_dir", f.ConfDir))
		}
	}
}

// askFolder asks the plugins of one folder.
func (c *CNI) askFolder(ctx context.Context, of Folder) {
	networks := c.networksIn(of)
	if len(networks) == 0 || ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeoutCause(ctx, min(statusLimit, c.cfg.Timeout), errors.New("no answer in time"))
	defer cancel()
	status := c.statusOf(ctx, networks)
	c.mu.Lock()
	defer c.mu.Unlock()
	f, ok := c.folders[of]
	switch {
	case !ok || !slices.EqualFunc(networks, f.networks, network.equal):
		return // others are used by now
	case status == nil:
		f.wellAt = time.Now()
	case !f.wellAt.IsZero() && time.Since(f.wellAt) < c.cfg.StatusGrace:
		c.log.WarnContext(ctx, "a plugin is not well, the network stays ready for a while", slog.Any("error", status))
		return
	}
	f.status = status
}

// statusOf returns what the first plugin that cannot take pods says.
func (c *CNI) statusOf(ctx context.Context, networks []network) error {
	for _, n := range networks {
		for _, p := range n.List.Plugins {
			one := *n.List
			one.Plugins = []*libcni.PluginConfig{p}
			err := c.probe.GetStatusNetworkList(ctx, &one)
			if err == nil || unknownCommand(err) {
				continue
			}
			if cause := context.Cause(ctx); cause != nil {
				err = cause
			}
			return fmt.Errorf("network %q: plugin %q: %w: %w", n.List.Name, p.Network.Type, err, errdefs.ErrUnavailable)
		}
	}
	return nil
}

// unknownCommand says whether a plugin complains of the command itself. Some leave commands
// out that their version of CNI has; that says nothing about their networks.
func unknownCommand(err error) bool {
	var said *types.Error
	return errors.As(err, &said) && said.Code == types.ErrInvalidEnvironmentVariables
}
