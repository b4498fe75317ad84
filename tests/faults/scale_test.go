//go:build integration

package faults

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/bbolt"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// What the store of records holds before a system under load is looked at.
const (
	manySandboxes  = 250
	manyContainers = 5000
	// kubeletLimit is the longest message that kubelet takes.
	kubeletLimit = 16 << 20
)

// copies is the id of the n-th copy of an object; its first digits are the number.
func copies(kind byte, n int) string {
	return fmt.Sprintf("%c%05d%s", kind, n, strings.Repeat("0", 58))
}

// multiply puts copies of an ended container and its stopped pod into the records, under ids
// of their own, while sandboxd is away. In the wire form of a message what is appended wins,
// so the copies need to know no more of a record than the places of its ids.
func (s *system) multiply(pod, container string) {
	s.t.Helper()
	const fieldID, fieldSandboxID, fieldSandboxConfig, fieldConfig = 1, 2, 3, 4
	db, err := bbolt.Open(s.Path("lib", "records.db"), 0o600, &bbolt.Options{Timeout: 5 * time.Second})
	must(s.t, err)
	must(s.t, db.Update(func(tx *bbolt.Tx) error {
		text := func(record []byte, field protowire.Number, value string) []byte {
			return protowire.AppendString(protowire.AppendTag(record, field, protowire.BytesType), value)
		}
		add := func(bucket string, origin, id string, more func([]byte) ([]byte, error)) error {
			b := tx.Bucket([]byte(bucket))
			record, err := more(text(slices.Clone(b.Get([]byte(origin))), fieldID, id))
			if err != nil {
				return err
			}
			return b.Put([]byte(id), record)
		}
		config := func(record []byte, field protowire.Number, m proto.Message) ([]byte, error) {
			data, err := proto.Marshal(m)
			return protowire.AppendBytes(protowire.AppendTag(record, field, protowire.BytesType), data), err
		}
		for n := range manySandboxes {
			err := add("sandboxes", pod, copies('a', n), func(record []byte) ([]byte, error) {
				return config(record, fieldSandboxConfig, &criv1.PodSandboxConfig{Metadata: &criv1.PodSandboxMetadata{Name: fmt.Sprint("copy", n), Uid: fmt.Sprint("copy-uid", n)}})
			})
			if err != nil {
				return err
			}
		}
		for n := range manyContainers {
			err := add("containers", container, copies('b', n), func(record []byte) ([]byte, error) {
				return config(text(record, fieldSandboxID, copies('a', n%manySandboxes)), fieldConfig, &criv1.ContainerConfig{
					Metadata: &criv1.ContainerMetadata{Name: fmt.Sprint("copy", n)}, Labels: map[string]string{"tenth": fmt.Sprint(n % 10)},
				})
			})
			if err != nil {
				return err
			}
		}
		return nil
	}))
	must(s.t, db.Close())
}

// kubelet is a client with kubelet's limit of messages.
func (s *system) kubelet() criv1.RuntimeServiceClient {
	s.t.Helper()
	conn, err := grpc.NewClient("unix://"+s.Socket(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(kubeletLimit)))
	must(s.t, err)
	s.t.Cleanup(func() { _ = conn.Close() })
	return criv1.NewRuntimeServiceClient(conn)
}

// gather reads a stream to its end.
func gather[Piece, Item any](stream grpc.ServerStreamingClient[Piece], err error, items func(*Piece) []Item) ([]Item, error) {
	if err != nil {
		return nil, err
	}
	var all []Item
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, items(piece)...)
	}
}

// lists are all calls that list, each giving how many objects it has.
func lists(cri criv1.RuntimeServiceClient) map[string]func(context.Context) (int, error) {
	return map[string]func(context.Context) (int, error){
		"ListContainers": func(ctx context.Context) (int, error) {
			a, err := cri.ListContainers(ctx, &criv1.ListContainersRequest{})
			return len(a.GetContainers()), err
		},
		"ListPodSandbox": func(ctx context.Context) (int, error) {
			a, err := cri.ListPodSandbox(ctx, &criv1.ListPodSandboxRequest{})
			return len(a.GetItems()), err
		},
		"ListContainerStats": func(ctx context.Context) (int, error) {
			a, err := cri.ListContainerStats(ctx, &criv1.ListContainerStatsRequest{})
			return len(a.GetStats()), err
		},
		"ListPodSandboxStats": func(ctx context.Context) (int, error) {
			a, err := cri.ListPodSandboxStats(ctx, &criv1.ListPodSandboxStatsRequest{})
			return len(a.GetStats()), err
		},
		"ListPodSandboxMetrics": func(ctx context.Context) (int, error) {
			a, err := cri.ListPodSandboxMetrics(ctx, &criv1.ListPodSandboxMetricsRequest{})
			return len(a.GetPodMetrics()), err
		},
	}
}

// latencies are how long calls took.
type latencies map[string][]time.Duration

// round makes each of the calls once; each must succeed.
func (l latencies) round(t *testing.T, calls map[string]func(context.Context) (int, error)) map[string]int {
	t.Helper()
	found := map[string]int{}
	for name, call := range calls {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		begun := time.Now()
		n, err := call(ctx)
		l[name] = append(l[name], time.Since(begun))
		cancel()
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		found[name] = n
	}
	return found
}

func (l latencies) log(t *testing.T, when string) {
	t.Helper()
	for name, all := range l {
		slices.Sort(all)
		t.Logf("%-15s %-22s median %6.1f ms, worst %6.1f ms of %d", when, name, all[len(all)/2].Seconds()*1e3, all[len(all)-1].Seconds()*1e3, len(all))
	}
}

// Five thousand containers are listed within kubelet's limits, filtered and in pieces too;
// and lists answer while pods are being made, whether or not one of those is ever ready.
func TestListsOfManyWhilePodsAreMade(t *testing.T) {
	gate := switches{t: t, dir: t.TempDir()}
	s := start(t, testenv.Setup{})
	must(t, os.Chmod(gate.dir, 0o755))
	origin := s.podConfig("origin")
	origin.Annotations = map[string]string{"kubernetes.io/config.source": "api", "long": strings.Repeat("x", 500)}
	pod := s.pod(origin, "")
	c := script("origin", "true")
	c.Labels = map[string]string{"io.kubernetes.pod.name": "origin", "io.kubernetes.pod.namespace": "faults", "io.kubernetes.pod.uid": "origin-uid"}
	c.Annotations = map[string]string{"io.kubernetes.container.hash": "abcdef", "long": strings.Repeat("y", 1000)}
	container := s.container(pod, origin, c)
	s.waitExit(container, patience)
	must(t, s.stopPod(pod))
	must(t, s.Stop(t.Context(), testenv.Sandboxd))
	records := s.Path("lib", "records.db")
	before, err := os.ReadFile(records)
	must(t, err)
	s.multiply(pod, container)
	begun := time.Now()
	must(t, s.Run(testenv.Sandboxd))
	must(t, s.WaitReady(t.Context()))
	t.Logf("ready with %d containers after %.1f s", manyContainers, time.Since(begun).Seconds())
	// The copies are records alone: no removal would find anything of theirs.
	t.Cleanup(func() { s.restore(records, before) })

	cri := s.kubelet()
	s.checkMany(cri)
	s.listUnderLoad(cri, gate)
}

// restore puts the records back as they were; the pods made since must be gone.
func (s *system) restore(records string, data []byte) {
	if err := s.Stop(context.WithoutCancel(s.t.Context()), testenv.Sandboxd); err != nil {
		s.t.Error(err)
	}
	if err := os.WriteFile(records, data, 0o600); err != nil {
		s.t.Error(err)
	}
	if err := s.Run(testenv.Sandboxd); err != nil {
		s.t.Error(err)
	}
	if err := s.WaitReady(context.WithoutCancel(s.t.Context())); err != nil {
		s.t.Error(err)
	}
}

// checkMany compares the lists with each filter, whole and in pieces.
func (s *system) checkMany(cri criv1.RuntimeServiceClient) {
	t := s.t
	t.Helper()
	exited := &criv1.ContainerStateValue{State: criv1.ContainerState_CONTAINER_EXITED}
	running := &criv1.ContainerStateValue{State: criv1.ContainerState_CONTAINER_RUNNING}
	for _, f := range []struct {
		filter *criv1.ContainerFilter
		want   int
	}{
		{nil, manyContainers + 1},
		{&criv1.ContainerFilter{}, manyContainers + 1},
		{&criv1.ContainerFilter{Id: copies('b', 4321)}, 1},
		{&criv1.ContainerFilter{Id: "b0432"}, 10},
		{&criv1.ContainerFilter{Id: "bffff"}, 0},
		{&criv1.ContainerFilter{State: exited}, manyContainers + 1},
		{&criv1.ContainerFilter{State: running}, 0},
		{&criv1.ContainerFilter{PodSandboxId: copies('a', 7)}, manyContainers / manySandboxes},
		{&criv1.ContainerFilter{LabelSelector: map[string]string{"tenth": "3"}}, manyContainers / 10},
		{&criv1.ContainerFilter{LabelSelector: map[string]string{"tenth": "3", "io.kubernetes.pod.name": "origin"}}, manyContainers / 10},
		{&criv1.ContainerFilter{LabelSelector: map[string]string{"tenth": "x"}}, 0},
		{&criv1.ContainerFilter{PodSandboxId: copies('a', 7), State: exited, LabelSelector: map[string]string{"tenth": "7"}, Id: "b"}, manyContainers / manySandboxes},
		{&criv1.ContainerFilter{PodSandboxId: copies('a', 7), LabelSelector: map[string]string{"tenth": "8"}}, 0},
	} {
		whole, err := cri.ListContainers(t.Context(), &criv1.ListContainersRequest{Filter: f.filter})
		must(t, err)
		stream, err := cri.StreamContainers(t.Context(), &criv1.StreamContainersRequest{Filter: f.filter})
		pieces, err := gather(stream, err, (*criv1.StreamContainersResponse).GetContainers)
		must(t, err)
		if len(whole.GetContainers()) != f.want {
			t.Errorf("containers with %v: %d, want %d", f.filter, len(whole.GetContainers()), f.want)
		}
		if !proto.Equal(whole, &criv1.ListContainersResponse{Containers: pieces}) {
			t.Errorf("containers with %v: %d in pieces differ from %d", f.filter, len(pieces), len(whole.GetContainers()))
		}
		if size := proto.Size(whole); f.filter == nil && size < 4<<20 {
			t.Errorf("the list of all is %d bytes, less than the usual limit", size)
		}
	}
	notReady := &criv1.PodSandboxStateValue{State: criv1.PodSandboxState_SANDBOX_NOTREADY}
	for _, f := range []struct {
		filter *criv1.PodSandboxFilter
		want   int
	}{
		{nil, manySandboxes + 1},
		{&criv1.PodSandboxFilter{Id: "a0012"}, 10},
		{&criv1.PodSandboxFilter{State: notReady}, manySandboxes + 1},
		{&criv1.PodSandboxFilter{State: &criv1.PodSandboxStateValue{}}, 0},
		{&criv1.PodSandboxFilter{LabelSelector: map[string]string{"test": t.Name()}}, manySandboxes + 1},
		{&criv1.PodSandboxFilter{LabelSelector: map[string]string{"test": "other"}}, 0},
	} {
		whole, err := cri.ListPodSandbox(t.Context(), &criv1.ListPodSandboxRequest{Filter: f.filter})
		must(t, err)
		stream, err := cri.StreamPodSandboxes(t.Context(), &criv1.StreamPodSandboxesRequest{Filter: f.filter})
		pieces, err := gather(stream, err, (*criv1.StreamPodSandboxesResponse).GetPodSandboxes)
		must(t, err)
		if len(whole.GetItems()) != f.want || !proto.Equal(whole, &criv1.ListPodSandboxResponse{Items: pieces}) {
			t.Errorf("sandboxes with %v: %d, in pieces %d, want %d", f.filter, len(whole.GetItems()), len(pieces), f.want)
		}
	}
}

// listUnderLoad lists while many pods wait for a network that does not answer, and while they
// are made.
func (s *system) listUnderLoad(cri criv1.RuntimeServiceClient, gate switches) {
	t := s.t
	t.Helper()
	calls := lists(cri)
	idle := latencies{}
	for range 10 {
		idle.round(t, calls)
	}
	idle.log(t, "idle")

	count := scaled(t, 40)
	lock, err := os.Create(filepath.Join(gate.dir, "gate"))
	must(t, err)
	defer func() { _ = lock.Close() }()
	must(t, syscall.Flock(int(lock.Fd()), syscall.LOCK_EX))
	gate.plugin(s.Path("cni"), "logged-bridge", "bridge")
	gate.set("ADD", "flock -s "+lock.Name()+" true")
	var made sync.WaitGroup
	results := make(chan string, count)
	begun := time.Now()
	for n := range count {
		made.Go(func() {
			id, err := s.try(s.podConfig(fmt.Sprint("many", n)), "", 4*time.Minute)
			if err != nil {
				t.Errorf("pod %d: %v", n, err)
			}
			results <- id
		})
	}
	blocked := latencies{}
	for range 10 {
		found := blocked.round(t, calls)
		if found["ListContainers"] != manyContainers+1 || found["ListPodSandbox"] != manySandboxes+1 {
			t.Errorf("listed while no pod is ready: %v", found)
		}
	}
	if len(results) != 0 {
		t.Errorf("%d pods ended without a network", len(results))
	}
	blocked.log(t, "all blocked")
	must(t, syscall.Flock(int(lock.Fd()), syscall.LOCK_UN))
	busy := latencies{}
	for len(results) < count {
		busy.round(t, calls)
	}
	made.Wait()
	busy.log(t, "pods are made")
	t.Logf("%d pods at once were ready after %.1f s", count, time.Since(begun).Seconds())
	for when, all := range map[string]latencies{"blocked": blocked, "made": busy} {
		for name, each := range all {
			// Far from what any single pod waits for, and from kubelet's two minutes.
			if worst := slices.Max(each); worst > 15*time.Second {
				t.Errorf("while pods are %s, %s took %s", when, name, worst)
			}
		}
	}
	found := latencies{}.round(t, calls)
	for name, want := range map[string]int{"ListPodSandbox": manySandboxes + 1 + count, "ListPodSandboxStats": count, "ListPodSandboxMetrics": count, "ListContainerStats": 0} {
		if found[name] != want {
			t.Errorf("%s gives %d objects, want %d", name, found[name], want)
		}
	}
	close(results)
	var gone sync.WaitGroup
	for range 4 {
		gone.Go(func() {
			for id := range results {
				if err := errors.Join(s.stopPod(id), s.removePod(id)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	gone.Wait()
}
