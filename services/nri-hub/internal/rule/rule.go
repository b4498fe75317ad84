// Package rule says what an operator allows and demands: how each plugin is treated and
// what it may change, and which plugins a pod cannot do without.
//
// The package is pure and its values do not change once they are made, so that they may
// be used concurrently. It reads no configuration and enforces nothing.
package rule

import (
	"fmt"
	"slices"
	"strings"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/internal/podselector"
)

// Selector chooses pods.
type Selector = podselector.Selector

// Rights are what a plugin may do, and who may be the plugin. The zero value allows
// everything to everybody.
type Rights struct {
	UIDs        []uint32 // users of the plugin's process; empty means any
	GIDs        []uint32 // groups of the plugin's process; empty means any
	Executables []string // paths or patterns of its program; empty means any
	// Fields are names of what it may change, such as "env" or "linux.resources.cpu";
	// a name covers all below it. Nil means all, empty means nothing.
	Fields []string
	// Pods are those whose containers it may change.
	Pods Selector
	// Strip takes out of an answer what is not allowed, instead of failing the request.
	Strip bool
}

// MayChange reports whether the field is one that the plugin may change.
func (r Rights) MayChange(field string) bool {
	if r.Fields == nil {
		return true
	}
	return slices.ContainsFunc(r.Fields, func(f string) bool {
		return f == "*" || f == field || strings.HasPrefix(field, f+".")
	})
}

// Limited reports whether anything is not allowed.
func (r Rights) Limited() bool { return r.Fields != nil || !r.Pods.All() }

// Identify returns why a process may not be the plugin. executable is empty if it is not
// known, which is not enough where one is wanted.
func (r Rights) Identify(uid, gid uint32, executable string) error {
	if len(r.UIDs) > 0 && !slices.Contains(r.UIDs, uid) {
		return fmt.Errorf("user %d may not be this plugin, only %v", uid, r.UIDs)
	}
	if len(r.GIDs) > 0 && !slices.Contains(r.GIDs, gid) {
		return fmt.Errorf("group %d may not be this plugin, only %v", gid, r.GIDs)
	}
	if len(r.Executables) > 0 && (executable == "" || !podselector.Any(r.Executables, executable)) {
		return fmt.Errorf("program %q may not be this plugin, only %q", executable, r.Executables)
	}
	return nil
}

// Plugin is how one plugin is treated.
type Plugin struct {
	// Name is the plugin's name, with or without its index, or a shell pattern for either.
	Name string
	// Timeout is for one call; zero means the hub's own.
	Timeout time.Duration
	// Timeouts are for single requests, where they differ.
	Timeouts map[nri.Event]time.Duration
	// Synchronize is for one part of a synchronisation; zero means the hub's own.
	Synchronize time.Duration
	// Parallel is how many requests it may have in flight; less than two keeps them in order.
	Parallel int
	// Disconnect ends the connection at a timeout, instead of waiting for the plugin aside.
	Disconnect bool
	// Observe applies nothing of what the plugin answers, and bears all its failures.
	Observe bool
	// Pods are those whose events it gets.
	Pods Selector
	// Rights are what it may do.
	Rights Rights
	// Listed says that the rule was written for this plugin and is not the default.
	Listed bool
}

// TimeoutOf is the limit of one call, zero if the rule does not say.
func (p Plugin) TimeoutOf(e nri.Event) time.Duration {
	if d := p.Timeouts[e]; d > 0 {
		return d
	}
	return p.Timeout
}

// Plugins are the rules in the order of the configuration.
type Plugins []Plugin

// For is the first rule whose name matches, or one that says nothing.
func (ps Plugins) For(index, name string) Plugin {
	for _, p := range ps {
		if podselector.Any([]string{p.Name}, name) || podselector.Any([]string{p.Name}, index+"-"+name) {
			p.Listed = true
			return p
		}
	}
	return Plugin{}
}
