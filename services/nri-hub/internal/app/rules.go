package app

import (
	"errors"
	"fmt"
	"slices"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/change"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/config"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/launch"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/rule"
)

// synchronize is the name under which the limit of a synchronisation is configured beside
// those of the requests.
const synchronize = "Synchronize"

// pluginRules translates the configuration. Names of fields and requests that do not exist
// are errors: a rule with a slip in it would forbid or allow the wrong thing.
func pluginRules(cfg config.Config) (rule.Plugins, error) {
	var rules rule.Plugins
	var errs []error
	for i, p := range cfg.Plugins {
		r, err := pluginRule(p)
		if err != nil {
			errs = append(errs, fmt.Errorf("plugins[%d] %q: %w", i, p.Name, err))
		}
		if _, err := launch.Rlimits(p.Launch.Rlimits); err != nil {
			errs = append(errs, fmt.Errorf("plugins[%d] %q: launch.rlimits: %w", i, p.Name, err))
		}
		rules = append(rules, r)
	}
	return rules, errors.Join(errs...)
}

func pluginRule(p config.Plugin) (rule.Plugin, error) {
	r := rule.Plugin{
		Name:       p.Name,
		Timeout:    p.Timeout.Std(),
		Timeouts:   make(map[nri.Event]time.Duration),
		Parallel:   p.Parallel,
		Disconnect: p.OnTimeout == config.Disconnect,
		Observe:    p.ObserveOnly,
		Pods:       selector(p.Events),
		Rights: rule.Rights{
			UIDs:        p.Rights.UIDs,
			GIDs:        p.Rights.GIDs,
			Executables: p.Rights.Executables,
			Pods:        selector(p.Rights.Pods),
			Strip:       p.Rights.Violation == config.Strip,
		},
	}
	var errs []error
	if f := p.Rights.Fields; f != nil {
		r.Rights.Fields = slices.Clone(*f)
		if r.Rights.Fields == nil {
			r.Rights.Fields = []string{}
		}
		for _, name := range *f {
			if name != "*" && !slices.Contains(change.Fields(), name) {
				errs = append(errs, fmt.Errorf("rights.fields: %q is not known, write one of %v", name, change.Fields()))
			}
		}
	}
	for name, limit := range p.Timeouts {
		if name == synchronize {
			r.Synchronize = limit.Std()
			continue
		}
		e, ok := eventNamed(name)
		if !ok {
			errs = append(errs, fmt.Errorf("timeouts: request %q is not known, write for example RunPodSandbox", name))
		}
		r.Timeouts[e] = limit.Std()
	}
	return r, errors.Join(errs...)
}

func eventNamed(name string) (nri.Event, bool) {
	for e := nri.Event_UNKNOWN + 1; e < nri.Event_LAST; e++ {
		if e.PrettyName() == name {
			return e, true
		}
	}
	return 0, false
}

func selector(p config.Pods) rule.Selector {
	return rule.Selector{Namespaces: p.Namespaces, NotNamespaces: p.NotNamespaces, Labels: p.Labels, Annotations: p.Annotations}
}

func requiredRules(cfg config.Config) rule.Required {
	r := rule.Required{Annotations: cfg.Required.Annotations}
	if len(cfg.RequiredPlugins) > 0 {
		r.Demands = append(r.Demands, rule.Demand{Plugins: cfg.RequiredPlugins})
	}
	for _, d := range cfg.Required.Rules {
		r.Demands = append(r.Demands, rule.Demand{Plugins: d.Plugins, Pods: selector(d.Pods)})
	}
	for _, d := range cfg.Required.Exempt {
		r.Exempt = append(r.Exempt, rule.Demand{Plugins: d.Plugins, Pods: selector(d.Pods)})
	}
	return r
}
