package engine_test

import (
	"context"
	"errors"
	"testing"
)

// The plugins are asked while the writable layer is being made: the preparation does not wait for
// it, the commit does.
func TestLayerIsMadeBesideThePlugins(t *testing.T) {
	w := newWorld(t)
	w.layers = make(chan struct{})
	n := start(t, w, "boot")
	n.session(t, "gw")
	sid := runPod(t, n, "a")
	id, _, err := n.Containers.Prepare(t.Context(), "gw", sid, containerConfig("c"), "")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := n.Containers.Commit(ctx, id, nil); !errors.Is(err, context.Canceled) {
		t.Fatalf("commit without a layer: %v", err)
	}
	close(w.layers)
	if err := n.Containers.Commit(t.Context(), id, nil); err != nil {
		t.Fatal(err)
	}
	if !w.holds["rootfs "+id] {
		t.Error("committed without its layer")
	}
}

// A layer that cannot be made fails the commit; the abort that follows frees the name.
func TestLayerFails(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot")
	n.session(t, "gw")
	sid := runPod(t, n, "a")
	w.set("rootfs.prepare", errInjected)
	id, _, err := n.Containers.Prepare(t.Context(), "gw", sid, containerConfig("c"), "")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Containers.Commit(t.Context(), id, nil); !errors.Is(err, errInjected) {
		t.Fatalf("commit: %v", err)
	}
	if err := n.Containers.Abort(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	w.set("rootfs.prepare", nil)
	createContainer(t, n, sid, "c")
}

// An abort ends the making of a layer and waits for that end: nothing appears after it.
func TestAbortEndsTheLayer(t *testing.T) {
	w := newWorld(t)
	w.layers = make(chan struct{})
	n := start(t, w, "boot")
	n.session(t, "gw")
	sid := runPod(t, n, "a")
	id, _, err := n.Containers.Prepare(t.Context(), "gw", sid, containerConfig("c"), "")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Containers.Abort(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if w.called("rootfs.remove") != 1 || w.called("rootfs.prepare") != 0 {
		t.Errorf("removed %d times, made %d times", w.called("rootfs.remove"), w.called("rootfs.prepare"))
	}
	w.layers = nil
	createContainer(t, n, sid, "c")
}
