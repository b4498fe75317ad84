package config

import (
	"errors"
	"fmt"
	"path"
	"slices"

	"github.com/crisp-cri/crisp/services/internal/config"
)

// What happens to a plugin that does not answer in time.
const (
	Degrade    = "degrade"
	Disconnect = "disconnect"
)

// What happens to an answer that holds more than the plugin may change.
const (
	FailRequest = "fail"
	Strip       = "strip"
)

// Pods chooses pods. An empty one chooses all.
type Pods struct {
	Namespaces    []string          `toml:"namespaces,omitempty" comment:"Names or patterns such as \"team-*\"; empty: all."`
	NotNamespaces []string          `toml:"not_namespaces,omitempty" comment:"Names or patterns that are left out."`
	Labels        map[string]string `toml:"labels,omitempty" comment:"Labels that a pod must have; the value \"*\" stands for any."`
	Annotations   map[string]string `toml:"annotations,omitempty" comment:"Annotations that a pod must have; the value \"*\" stands for any."`
}

// Plugin is how one plugin is treated.
type Plugin struct {
	Name     string                     `toml:"name" comment:"\"name\", \"NN-name\" or a pattern such as \"9?-*\"."`
	Timeout  config.Duration            `toml:"timeout,omitempty" comment:"For one call, instead of timeouts.request."`
	Timeouts map[string]config.Duration `toml:"timeouts,omitempty" comment:"For single requests, such as RunPodSandbox = \"20s\", and for Synchronize."`
	Parallel int                        `toml:"parallel,omitempty" comment:"Requests that it may have in flight. More than one gives their order up."`
	// OnTimeout is Degrade or Disconnect; a plugin that states a policy of its own is
	// treated as that says.
	OnTimeout   string `toml:"on_timeout,omitempty" comment:"\"degrade\" goes on without it and brings it back aside; \"disconnect\" ends the connection."`
	ObserveOnly bool   `toml:"observe_only,omitempty" comment:"Call it, record what it wants, apply nothing."`
	Events      Pods   `toml:"events,omitempty" comment:"Pods whose events it gets."`
	Rights      Rights `toml:"rights,omitempty" comment:"What it may do, and who may be it."`
	Launch      Limits `toml:"launch,omitempty" comment:"How it is run, if the hub starts it."`
}

// Rights are what a plugin may do, and who may be it.
type Rights struct {
	UIDs        []uint32 `toml:"uids,omitempty" comment:"Users of its process; empty: any."`
	GIDs        []uint32 `toml:"gids,omitempty" comment:"Groups of its process; empty: any."`
	Executables []string `toml:"executables,omitempty" comment:"Paths or patterns of its program; empty: any. Needs a hub that may see whose program a process runs."`
	// Fields is a pointer, because an empty list allows nothing.
	Fields *[]string `toml:"fields,omitempty" comment:"What it may change, such as \"env\" or \"linux.resources.cpu\"; absent: all, empty: nothing."`
	Pods   Pods      `toml:"pods,omitempty" comment:"Pods whose containers it may change."`
	// Violation is FailRequest or Strip.
	Violation string `toml:"violation,omitempty" comment:"What happens to an answer with more than that: \"fail\" fails the request, \"strip\" takes it out."`
}

// Limits are how a launched plugin is run.
type Limits struct {
	Env     map[string]string `toml:"env,omitempty" comment:"Variables besides NRI's own."`
	Rlimits map[string]uint64 `toml:"rlimits,omitempty" comment:"Limits of its process by their names: as, core, cpu, data, fsize, memlock, nofile, nproc, stack."`
}

// Required says without which plugins pods and containers are not created.
type Required struct {
	Wait        config.Duration `toml:"wait" comment:"How long a request waits for a required plugin that is away, joining or degraded."`
	Annotations bool            `toml:"annotations" comment:"Whether pods may require plugins by the annotation required-plugins.noderesource.dev."`
	Rules       []Demand        `toml:"rules,omitempty" comment:"Plugins that the pods of some namespaces, labels or annotations require."`
	Exempt      []Demand        `toml:"exempt,omitempty" comment:"Pods that do not require these plugins (or any, if none is named), such as the plugin's own."`
}

// Demand names plugins for some pods.
type Demand struct {
	Plugins []string `toml:"plugins" comment:"\"name\" or \"NN-name\"."`
	Pods    Pods     `toml:"pods,omitempty"`
}

// Degraded says how plugins are treated that have not answered in time.
type Degraded struct {
	After    int             `toml:"after" comment:"Timeouts in a row until requests go on without the plugin."`
	MinPause config.Duration `toml:"min_pause" comment:"Pause before the plugin is tried again aside; it doubles each time that it does not answer."`
	MaxPause config.Duration `toml:"max_pause" comment:"Longest pause."`
}

// Validate implements config.Validator.
func (d Degraded) Validate() error {
	var errs []error
	if d.After < 1 {
		errs = append(errs, fmt.Errorf("after: %d is too few, write 1 or more", d.After))
	}
	if d.MaxPause < d.MinPause {
		errs = append(errs, fmt.Errorf("max_pause: %v is less than min_pause", d.MaxPause))
	}
	return errors.Join(append(errs, positive("min_pause", d.MinPause))...)
}

// Validate implements config.Validator.
func (r Required) Validate() error {
	errs := []error{positive("wait", r.Wait)}
	for i, d := range r.Rules {
		if len(d.Plugins) == 0 {
			errs = append(errs, fmt.Errorf("rules[%d].plugins: none is named, write for example [\"10-guard\"]", i))
		}
		errs = append(errs, config.Section(fmt.Sprintf("rules[%d].pods", i), d.Pods))
	}
	for i, d := range r.Exempt {
		errs = append(errs, config.Section(fmt.Sprintf("exempt[%d].pods", i), d.Pods))
	}
	return errors.Join(errs...)
}

// Validate implements config.Validator.
func (p Pods) Validate() error {
	return errors.Join(patterns("namespaces", p.Namespaces), patterns("not_namespaces", p.NotNamespaces))
}

// Validate implements config.Validator.
func (p Plugin) Validate() error {
	errs := []error{
		patterns("name", []string{p.Name}),
		oneOf("on_timeout", p.OnTimeout, Degrade, Disconnect),
		oneOf("rights.violation", p.Rights.Violation, FailRequest, Strip),
		config.Section("events", p.Events),
		config.Section("rights.pods", p.Rights.Pods),
		patterns("rights.executables", p.Rights.Executables),
	}
	if p.Name == "" {
		errs = append(errs, errors.New("name: is empty, write for example \"10-balloons\""))
	}
	if p.Parallel < 0 {
		errs = append(errs, fmt.Errorf("parallel: %d is negative", p.Parallel))
	}
	return errors.Join(errs...)
}

func oneOf(key, value string, known ...string) error {
	if value != "" && !slices.Contains(known, value) {
		return fmt.Errorf("%s: %q is not known, write one of %q", key, value, known)
	}
	return nil
}

func patterns(key string, values []string) error {
	for _, v := range values {
		if _, err := path.Match(v, ""); err != nil {
			return fmt.Errorf("%s: %q is no pattern: %w", key, v, err)
		}
	}
	return nil
}
