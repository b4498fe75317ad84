package extract

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// FolderLabel is the label by which the overlay snapshotter tells where a layer is.
const FolderLabel = "containerd.io/snapshot/overlay.upperdir"

// Folders returns the folders of a layer of overlayfs and of those below it, the topmost first;
// none for the layer "".
func Folders(ctx context.Context, sn snapshots.Snapshotter, layer string) ([]string, error) {
	var dirs []string
	for layer != "" {
		info, err := sn.Stat(ctx, layer)
		if err != nil {
			return nil, fmt.Errorf("layer %s: %w", layer, err)
		}
		dirs = append(dirs, info.Labels[FolderLabel])
		layer = info.Parent
	}
	return dirs, nil
}

// Lower tells where layers are.
type Lower struct {
	// Folders returns the folders of a layer, in overlayfs's notation, and of those below it, the
	// topmost first. They can be opened until release is called.
	Folders func(ctx context.Context, layer string) (dirs []string, release func(), err error)
	// Alike says that the lowest layer is prepared like all others, so that an applier cannot know it.
	Alike bool
}

// Aside is an overlay snapshotter and an applier for layers of which those below are not there
// yet: such a layer is prepared without a parent and settled when it is committed to one. A layer
// with hard links to files of those below is written only then. It serves one unpacking.
type Aside struct {
	snapshots.Snapshotter

	applier Applier
	lower   Lower
	done    func(layer digest.Digest)

	mu      sync.Mutex // mu guards pending
	pending map[string]pending
}

// pending is a layer that is written and not committed.
type pending struct {
	layer digest.Digest
	// finish does what is left to do in its folder on top of others; nil if that is nothing.
	finish func(ctx context.Context, folder string, lower []string) error
}

// NewAside returns a snapshotter on top of sn, and calls done after each layer that it has
// committed.
func NewAside(sn snapshots.Snapshotter, a Applier, lower Lower, done func(layer digest.Digest)) *Aside {
	return &Aside{Snapshotter: sn, applier: a, lower: lower, done: done, pending: map[string]pending{}}
}

// Apply implements diff.Applier for layers that this snapshotter has prepared. Errors are those of
// [Applier.Apply].
func (a *Aside) Apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount, opts ...diff.ApplyOpt) (ocispec.Descriptor, error) {
	folder, lower, overlay := overlayFolders(mounts)
	if !overlay && a.lower.Alike && len(mounts) == 1 && mounts[0].Type == "bind" {
		folder, overlay = mounts[0].Source, true
	}
	if !overlay || len(lower) > 0 {
		got, err := a.applier.Apply(ctx, desc, mounts, opts...)
		if err == nil && !overlay && len(mounts) == 1 {
			a.put(mounts[0].Source, pending{layer: desc.Digest})
		}
		return got, err
	}
	l := a.applier.target.newLayer(true, nil)
	finish := func(ctx context.Context, folder string, lower []string) error {
		return judge(ctx, l.settleOver(folder, lower))
	}
	got, err := a.applier.read(ctx, desc, func(r io.Reader) error {
		err := l.write(ctx, folder, r)
		if errors.Is(err, errBelow) {
			finish = func(ctx context.Context, folder string, lower []string) error {
				return a.again(ctx, desc, folder, lower)
			}
			_, err = io.Copy(io.Discard, r)
		}
		return err
	})
	if err != nil {
		return got, judge(ctx, err)
	}
	l.own, l.hidden = nil, nil // a layer may wait long
	a.put(folder, pending{desc.Digest, finish})
	return got, nil
}

// again writes a layer whose first writing was given up.
func (a *Aside) again(ctx context.Context, desc ocispec.Descriptor, folder string, lower []string) error {
	if err := Empty(folder); err != nil {
		return err
	}
	_, err := a.applier.Apply(ctx, desc, Over(folder, lower))
	return err
}

func (l *layer) settleOver(folder string, lower []string) error {
	b, err := openBelow(lower, l.notes())
	if err != nil {
		return err
	}
	defer b.close()
	return l.settle(folder, b)
}

func (a *Aside) put(folder string, p pending) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pending[folder] = p
}

func (a *Aside) take(folder string) (pending, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	p, ok := a.pending[folder]
	delete(a.pending, folder)
	return p, ok
}

// Commit implements snapshots.Snapshotter. The parent among the options must be committed.
func (a *Aside) Commit(ctx context.Context, name, key string, opts ...snapshots.Opt) error {
	mounts, err := a.Mounts(ctx, key)
	if err != nil {
		return err
	}
	folder, _, overlay := overlayFolders(mounts)
	if !overlay && len(mounts) == 1 {
		folder = mounts[0].Source
	}
	p, ok := a.take(folder)
	if ok && p.finish != nil {
		if err := a.finish(ctx, p, folder, opts); err != nil {
			return fmt.Errorf("layer %s: %w", p.layer, err)
		}
	}
	if err := a.Snapshotter.Commit(ctx, name, key, opts...); err != nil {
		return err
	}
	if ok {
		a.done(p.layer)
	}
	return nil
}

// finish puts a layer on top of the parent that it is committed to.
func (a *Aside) finish(ctx context.Context, p pending, folder string, opts []snapshots.Opt) error {
	var info snapshots.Info
	for _, opt := range opts {
		if err := opt(&info); err != nil {
			return err
		}
	}
	lower, release, err := a.lower.Folders(ctx, info.Parent)
	if err != nil {
		return err
	}
	defer release()
	if err := TakeOwner(folder, lower); err != nil {
		return err
	}
	return p.finish(ctx, folder, lower)
}
