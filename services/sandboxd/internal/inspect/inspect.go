// Package inspect tells an operator, or a test, whether what sandboxd has recorded is
// consistent in itself and with what is on the machine, and what the pods and their shims
// are.
//
// It only looks: it changes nothing, sends nothing to a shim but an empty connection, and
// works whether sandboxd runs or not. What must be true is in package rules. Records and
// machine are read one after the other while sandboxd may be working, so a single look can
// be wrong about what was changing at that moment: Check therefore looks again and reports
// what stays.
package inspect

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/crisp-cri/crisp/services/internal/pause"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/config"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/inspect/rules"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// allEvents is more than an outbox can hold.
const allEvents = 1 << 30

// lookPause is the time between two looks.
const lookPause = 250 * time.Millisecond

// ReadRecords reads the records from a copy of the database, so that a running sandboxd is
// neither needed nor disturbed.
func ReadRecords(ctx context.Context, root string) (rec rules.Records, err error) {
	err = withCopy(ctx, filepath.Join(root, "records.db"), func(path string) error {
		s, err := store.OpenReadOnly(path)
		if err != nil {
			return err
		}
		defer s.Close() //nolint:errcheck // nothing was written
		rec.Snapshot, err = s.Load()
		if err != nil {
			return err
		}
		rec.Events, err = s.Events(allEvents)
		return err
	})
	return rec, err
}

// withCopy runs fn with the path of a copy of a database that may be in use.
func withCopy(ctx context.Context, path string, fn func(path string) error) error {
	dir, err := os.MkdirTemp("", "sandboxd-inspect-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a copy that stays does no harm
	to := filepath.Join(dir, "copy.db")
	err = store.Copy(ctx, path, to)
	if err != nil {
		return err
	}
	return fn(to)
}

// Check looks at records and machine until nothing is wrong or wait is over, and returns,
// sorted, what was wrong at every look.
func Check(ctx context.Context, cfg config.Config, wait time.Duration) ([]rules.Finding, error) {
	deadline := time.Now().Add(wait)
	var lasting []rules.Finding
	for first := true; ; first = false {
		found, err := checkOnce(ctx, cfg)
		if err != nil {
			return nil, err
		}
		if first {
			lasting = found
		} else {
			lasting = slices.DeleteFunc(lasting, func(f rules.Finding) bool { return !slices.Contains(found, f) })
		}
		if len(lasting) == 0 || time.Now().After(deadline) {
			return lasting, nil
		}
		if !pause.For(ctx, lookPause) {
			return nil, context.Cause(ctx)
		}
	}
}

func checkOnce(ctx context.Context, cfg config.Config) ([]rules.Finding, error) {
	before, err := ReadRecords(ctx, cfg.Root)
	if err != nil {
		return nil, err
	}
	// Groups are looked for where the records, before or now, say that some may be.
	seen, err := Look(ctx, cfg, groupParents(before))
	if err != nil {
		return nil, err
	}
	rec, err := ReadRecords(ctx, cfg.Root)
	if err != nil {
		return nil, err
	}
	found := append(rules.Validate(rec), rules.Compare(rec, seen)...)
	slices.SortFunc(found, func(a, b rules.Finding) int {
		return cmp.Or(cmp.Compare(a.Rule, b.Rule), cmp.Compare(a.ID, b.ID), cmp.Compare(a.Text, b.Text))
	})
	return found, nil
}
