package storage

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
)

const (
	// leaseLife bounds how long something half made is kept if its lease could not be
	// released, for example on a full disk.
	leaseLife = 24 * time.Hour
	// KeepLife is how long what an interrupted piece of work has made is kept for the next
	// attempt at it.
	KeepLife = time.Hour

	// labelWork names the piece of work that a lease belongs to.
	labelWork = "crisp.io/work"
	// labelKept marks the lease of work that was interrupted and may be taken up again.
	labelKept = "crisp.io/kept"
	// labelExpire is the library's label for the end of a lease.
	labelExpire = "containerd.io/gc.expire"
)

// Held keeps what is made under its context. It must be released or kept in the end.
type Held struct {
	st    *Storage
	lease leases.Lease
	work  string
	// Resumed says that something was there from an earlier attempt at the same work.
	Resumed bool
}

// Lease returns a context under which everything that is made is held. With the name of a
// piece of work, what was kept of an earlier attempt at it is held too.
func (s *Storage) Lease(ctx context.Context, work string) (context.Context, *Held, error) {
	h := &Held{st: s, work: work}
	err := s.Update(ctx, func(ctx context.Context) error {
		opts := []leases.Opt{leases.WithRandomID(), leases.WithExpiration(leaseLife)}
		if work != "" {
			opts = append(opts, leases.WithLabel(labelWork, work))
		}
		var err error
		if h.lease, err = s.leases.Create(ctx, opts...); err != nil {
			return err
		}
		if work == "" {
			return nil
		}
		return s.eachKept(ctx, func(old leases.Lease) error {
			if old.Labels[labelWork] != work {
				return nil
			}
			n, err := s.moveLease(ctx, old, h.lease, func(leases.Resource) bool { return true })
			h.Resumed = h.Resumed || n > 0
			return err
		})
	})
	if err != nil {
		return nil, nil, fmt.Errorf("lease: %w", err)
	}
	return leases.WithLease(ctx, h.lease.ID), h, nil
}

// Release ends the lease. What something durable refers to by then stays.
func (h *Held) Release(ctx context.Context) error {
	if err := h.st.leases.Delete(ctx, h.lease); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("lease %s: %w", h.lease.ID, err)
	}
	return nil
}

// Keep ends the lease and keeps what it holds for the next attempt at the work, for
// [KeepLife] at most.
func (h *Held) Keep(ctx context.Context) error {
	err := h.st.Update(ctx, func(ctx context.Context) error {
		return h.st.keep(ctx, h.lease, time.Now().Add(KeepLife), func(leases.Resource) bool { return true })
	})
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("lease %s: %w", h.lease.ID, err)
	}
	return nil
}

// DropKept gives up what was kept of interrupted work. The space is free after the next
// collection.
func (s *Storage) DropKept(ctx context.Context) error {
	err := s.Update(ctx, func(ctx context.Context) error {
		return s.eachKept(ctx, func(l leases.Lease) error { return s.leases.Delete(ctx, l) })
	})
	if err != nil {
		return fmt.Errorf("leases: %w", err)
	}
	return nil
}

func (s *Storage) eachKept(ctx context.Context, fn func(leases.Lease) error) error {
	all, err := s.leases.List(ctx)
	if err != nil {
		return err
	}
	for _, l := range all {
		if l.Labels[labelKept] == "" {
			continue
		}
		if err := fn(l); err != nil {
			return err
		}
	}
	return nil
}

// keep puts in the place of a lease one that waits for the next attempt at its work.
func (s *Storage) keep(ctx context.Context, old leases.Lease, until time.Time, wanted func(leases.Resource) bool) error {
	if old.Labels[labelWork] == "" || !until.After(time.Now()) {
		return s.leases.Delete(ctx, old)
	}
	next, err := s.leases.Create(ctx, leases.WithRandomID(), leases.WithLabels(map[string]string{
		labelWork: old.Labels[labelWork], labelKept: "true", labelExpire: until.UTC().Format(time.RFC3339),
	}))
	if err != nil {
		return err
	}
	n, err := s.moveLease(ctx, old, next, wanted)
	if err == nil && n == 0 {
		err = s.leases.Delete(ctx, next)
	}
	return err
}

// moveLease puts what a lease holds under another one, if it is wanted, and ends the first.
// It returns how much was moved.
func (s *Storage) moveLease(ctx context.Context, from, to leases.Lease, wanted func(leases.Resource) bool) (moved int, err error) {
	resources, err := s.leases.ListResources(ctx, from)
	if err != nil {
		return 0, err
	}
	for _, r := range resources {
		if !wanted(r) {
			continue
		}
		if err := s.leases.AddResource(ctx, to, r); err != nil {
			return moved, err
		}
		moved++
	}
	return moved, s.leases.Delete(ctx, from)
}

// sweepLeases ends the leases of an earlier life of the process. Whole and partial blobs of
// work that may be taken up again are kept. Snapshots are not: they were never synced.
func (s *Storage) sweepLeases(ctx context.Context) error {
	return s.Update(ctx, func(ctx context.Context) error {
		old, err := s.leases.List(ctx)
		if err != nil {
			return fmt.Errorf("leases: %w", err)
		}
		for _, l := range old {
			until := time.Now().Add(KeepLife)
			if l.Labels[labelKept] != "" {
				// What makes no sense is over.
				until, _ = time.Parse(time.RFC3339, l.Labels[labelExpire])
			}
			err := s.keep(ctx, l, until, func(r leases.Resource) bool { return r.Type == "content" || r.Type == "ingests" })
			if err != nil {
				return errors.Join(fmt.Errorf("lease %s", l.ID), err)
			}
		}
		return nil
	})
}
