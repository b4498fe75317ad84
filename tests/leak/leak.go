// Package leak finds what a run of the runtime left behind on the machine.
//
// Take lists what a runtime makes: processes, mounts, cgroups, network links,
// packet filter rules, sockets, FIFOs and files, also those that are passed to an
// OCI runtime in the machine's folder for temporary files. The difference of two
// snapshots is what was not taken down between them. Processes that have ended
// but were not yet reaped by their parent do not count. Only what belongs to
// the caller's mount and network namespace is looked at, apart from those, so that other
// work on the same machine does not show.
//
// The package reports; it removes nothing.
package leak

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Scope narrows what counts.
type Scope struct {
	// Dirs are folders of which each file, folder, FIFO and socket counts.
	Dirs []string
	// CgroupPrefix, if set, makes only cgroups whose path contains it count.
	CgroupPrefix string
	// Ignore drops findings, given as "kind: text".
	Ignore []*regexp.Regexp
}

// Snapshot is what existed at one moment: for each kind, the set of findings.
type Snapshot map[string]map[string]bool

// Take makes a snapshot. A part of the system that cannot be read is an error.
func Take(ctx context.Context, scope Scope) (Snapshot, error) {
	snapshot := Snapshot{}
	var problems []error
	for kind, read := range map[string]func(context.Context, Scope) ([]string, error){
		"process":  processes,
		"mount":    mounts,
		"cgroup":   cgroups,
		"link":     links,
		"iptables": filterRules,
		"socket":   sockets,
		"file":     files,
		"passed":   passed,
	} {
		found, err := read(ctx, scope)
		if err != nil {
			problems = append(problems, fmt.Errorf("%s: %w", kind, err))
		}
		snapshot[kind] = map[string]bool{}
		for _, text := range found {
			if !scope.ignored(kind + ": " + text) {
				snapshot[kind][text] = true
			}
		}
	}
	return snapshot, errors.Join(problems...)
}

func (s Scope) ignored(text string) bool {
	return slices.ContainsFunc(s.Ignore, func(r *regexp.Regexp) bool { return r.MatchString(text) })
}

// Since gives what exists in s and did not exist in before, as sorted lines of
// "kind: text".
func (s Snapshot) Since(before Snapshot) []string {
	var leaked []string
	for kind, found := range s {
		for text := range maps.Keys(found) {
			if !before[kind][text] {
				leaked = append(leaked, kind+": "+text)
			}
		}
	}
	slices.Sort(leaked)
	return leaked
}

// Settle takes snapshots until nothing is left over since before, or the time
// is up, and gives the last left-overs. Kernel and init take a moment to finish
// what the runtime has let go of.
func Settle(ctx context.Context, before Snapshot, scope Scope, limit time.Duration) ([]string, error) {
	deadline := time.Now().Add(limit)
	for {
		now, err := Take(ctx, scope)
		if err != nil {
			return nil, err
		}
		leaked := now.Since(before)
		if len(leaked) == 0 || time.Now().After(deadline) {
			return leaked, nil
		}
		select {
		case <-ctx.Done():
			return leaked, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Report is a readable text of what leaked.
func Report(leaked []string) string {
	return fmt.Sprintf("%d left behind:\n  %s", len(leaked), strings.Join(leaked, "\n  "))
}
