package roster

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/rule"
)

// Validator accepts or refuses a merged adjustment.
type Validator interface {
	ValidateContainerAdjustment(ctx context.Context, req *nri.ValidateContainerAdjustmentRequest) error
}

// Policy are the rules that may change while the hub runs.
type Policy struct {
	Plugins    rule.Plugins  // how single plugins are treated
	ListedOnly bool          // refuse plugins for which there is no rule
	Required   rule.Required // plugins without which pods and containers are not created
	Validator  Validator     // of each merged adjustment; nil if there is none
}

// SetPolicy changes the required plugins, the rules for plugins that connect from now on, and
// the validator. A plugin that is connected keeps the rule that it was met with.
func (r *Roster) SetPolicy(p Policy) {
	r.policy.Store(&p)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.policies++
	r.refresh()
}

// Policy are the rules in force. They are not to be changed.
func (r *Roster) Policy() *Policy { return r.policy.Load() }

// Rule is how a plugin is treated that comes now.
func (r *Roster) Rule(id plug.ID) rule.Plugin { return r.Policy().Plugins.For(id.Index, id.Name) }

// Admit returns why a plugin is not welcome: because there is no rule for it although one
// is wanted, or because its process is not one of those that may be the plugin.
func (r *Roster) Admit(info plug.Info) error {
	p := r.Policy()
	of := p.Plugins.For(info.ID.Index, info.ID.Name)
	if !of.Listed && p.ListedOnly {
		return fmt.Errorf("plugin %q is not listed in the configuration: %w", info.ID, errdefs.ErrPermissionDenied)
	}
	if info.Kind != plug.External {
		return nil // put where the hub finds it by who may do so
	}
	if err := of.Rights.Identify(info.UID, info.GID, info.Executable); err != nil {
		return fmt.Errorf("plugin %q: process %d: %w: %w", info.ID, info.PID, err, errdefs.ErrPermissionDenied)
	}
	return nil
}
