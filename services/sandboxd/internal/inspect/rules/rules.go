// Package rules holds what must be true of sandboxd's records in themselves (Validate), and
// of records and machine together (Compare).
//
// Its functions are pure: they are given what was read and return what is wrong. They
// judge one moment; what was changing at that moment can look wrong.
package rules

import (
	"fmt"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// Finding is one violated rule.
type Finding struct {
	// Rule is the short name of the rule, such as "container.times" or "orphan.mount".
	Rule string `json:"rule"`
	// ID is the id or path of the object.
	ID string `json:"id"`
	// Text says what is wrong.
	Text string `json:"text"`
}

// String is the line for humans.
func (f Finding) String() string { return f.Rule + " " + f.ID + ": " + f.Text }

// Records is everything that sandboxd has recorded.
type Records struct {
	store.Snapshot

	// Events are the entries of the outbox; one that cannot be read has a nil Event.
	Events []store.Entry
}

// report collects findings.
type report []Finding

func (r *report) add(rule, id, format string, args ...any) {
	*r = append(*r, Finding{Rule: rule, ID: id, Text: fmt.Sprintf(format, args...)})
}
