package network

import (
	"context"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/version"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/network/runtimeconf"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Check asks the plugins of each network of an attached pod whether all is there that they made,
// with CNI's CHECK command. Networks before CNI 0.4.0, which had none, and those that say
// disableCheck are left out. It changes nothing. raw is the result of Attach. The error joins
// what all networks complain of.
func (c *CNI) Check(ctx context.Context, req pod.NetworkRequest, raw []byte) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.cfg.Timeout, errors.New("no answer in time"))
	defer cancel()
	networks, err := c.attachedTo(req.SandboxID, raw)
	if err != nil {
		return err
	}
	capabilities, err := runtimeconf.Capabilities(req.Config)
	if err != nil {
		return err
	}
	var errs []error
	for _, n := range networks {
		known, err := version.GreaterThanOrEqualTo(n.List.CNIVersion, "0.4.0")
		if err != nil || !known {
			continue
		}
		err = c.probe.CheckNetworkList(ctx, n.List, runtimeconf.For(req, n.IfName, req.NetnsPath, capabilities))
		if err != nil && !unknownCommand(err) {
			errs = append(errs, fmt.Errorf("network %q: %w", n.List.Name, err))
		}
	}
	return errors.Join(errs...)
}
