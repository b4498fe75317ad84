package snapproxy

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/plugins/snapshots/native"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// slow answers what it is asked about "slow" only when its caller has left.
type slow struct{ snapshots.Snapshotter }

func (s slow) Stat(ctx context.Context, key string) (snapshots.Info, error) {
	if key == "slow" {
		<-ctx.Done()
		return snapshots.Info{}, ctx.Err()
	}
	return s.Snapshotter.Stat(ctx, key)
}

func (s slow) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	if key == "slow" {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	mounts, err := s.Snapshotter.Prepare(ctx, key, parent, opts...)
	if key == "odd" && err == nil {
		mounts[0].Type = "format/overlay"
	}
	return mounts, err
}

func serve(t *testing.T, sn snapshots.Snapshotter, socket string) (stop func()) {
	t.Helper()
	lis, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server, done := grpc.NewServer(), make(chan error, 1)
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(sn))
	go func() { done <- server.Serve(lis) }()
	return func() {
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestSnapshotter(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "s.sock")
	backend, err := native.NewSnapshotter(filepath.Join(dir, "native"))
	if err != nil {
		t.Fatal(err)
	}
	defer backend.Close()
	s, err := New("stars", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.looking, s.making = 2*time.Second, 2*time.Second
	ctx := t.Context()
	away := func(what string, err error, text string) {
		t.Helper()
		if _, ok := errors.AsType[*Error](err); !ok || !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), `"stars" at `+socket) || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: error %v", what, err)
		}
	}
	_, err = s.Stat(ctx, "a")
	away("before it was there", err, "")
	away("walk before it was there", s.Walk(ctx, func(context.Context, snapshots.Info) error { return nil }), "")

	stop := serve(t, slow{backend}, socket)
	for begin := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		if _, err = s.Prepare(ctx, "a", ""); err == nil {
			break
		}
		if time.Since(begin) > 30*time.Second {
			t.Fatalf("it is there, but %v", err)
		}
	}
	mounts, err := s.Mounts(ctx, "a")
	if err != nil || len(mounts) != 1 {
		t.Errorf("mounts %v, %v", mounts, err)
	}
	if _, err := s.Usage(ctx, "a"); err != nil {
		t.Error(err)
	}
	if err := s.Commit(ctx, "b", "a", snapshots.WithLabels(map[string]string{"containerd.io/snapshot/x": "y"})); err != nil {
		t.Error(err)
	}
	if _, err := s.View(ctx, "v", "b"); err != nil {
		t.Error(err)
	}
	if info, err := s.Stat(ctx, "b"); err != nil || info.Labels["containerd.io/snapshot/x"] != "y" || info.Kind != snapshots.KindCommitted {
		t.Errorf("info %+v, %v", info, err)
	}
	if info, err := s.Update(ctx, snapshots.Info{Name: "b", Labels: map[string]string{"z": "1"}}, "labels.z"); err != nil || info.Labels["z"] != "1" {
		t.Errorf("info %+v, %v", info, err)
	}
	if _, err := s.Prepare(ctx, "v", "b"); !errdefs.IsAlreadyExists(err) {
		t.Errorf("made twice: %v", err)
	}
	if _, err := s.Stat(ctx, "nothing"); !errdefs.IsNotFound(err) {
		t.Errorf("unknown: %v", err)
	}
	n := 0
	if err := s.Walk(ctx, func(context.Context, snapshots.Info) error { n++; return nil }); err != nil || n != 2 {
		t.Errorf("%d snapshots, %v", n, err)
	}
	if err := s.Remove(ctx, "v"); err != nil {
		t.Error(err)
	}
	if err := s.Cleanup(ctx); err != nil && !errdefs.IsNotImplemented(err) {
		t.Error(err)
	}

	if _, err := s.Prepare(ctx, "odd", ""); !errdefs.IsNotImplemented(err) || !strings.Contains(err.Error(), `"format/overlay"`) {
		t.Errorf("a snapshot that cannot be mounted: %v", err)
	}
	if _, err := backend.Stat(ctx, "odd"); !errdefs.IsNotFound(err) {
		t.Errorf("it is left: %v", err)
	}

	_, err = s.Stat(ctx, "slow")
	away("no answer", err, "no answer within 2s")
	_, err = s.Prepare(ctx, "slow", "")
	away("no snapshot", err, "no answer within 2s")
	leaving, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := s.Stat(leaving, "slow"); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that left: %v", err)
	}
	stop()
	_, err = s.Stat(ctx, "b")
	away("after it went", err, "")
}
