package fit_test

import (
	"fmt"
	"strings"
	"testing"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/fit"
)

func TestChunksLoseNothingAndFit(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		const limit = 1000
		sizes := rapid.SliceOf(rapid.IntRange(0, 2*limit))
		var pods []*nri.PodSandbox
		for i, n := range sizes.Draw(t, "pods") {
			pods = append(pods, &nri.PodSandbox{Id: fmt.Sprint("p", i), Annotations: map[string]string{"a": strings.Repeat("x", n)}})
		}
		var containers []*nri.Container
		for i, n := range sizes.Draw(t, "containers") {
			containers = append(containers, &nri.Container{Id: fmt.Sprint("c", i), Env: []string{strings.Repeat("x", n)}})
		}
		chunks, slim := fit.Chunks(pods, containers, limit)
		if len(chunks) == 0 {
			t.Fatal("no chunk")
		}
		var ids []string
		for _, c := range chunks {
			if n := proto.Size(&nri.SynchronizeRequest{Pods: c.Pods, Containers: c.Containers}); n > limit {
				t.Fatalf("a chunk has %d bytes, the limit is %d", n, limit)
			}
			for _, p := range c.Pods {
				ids = append(ids, p.GetId())
			}
			for _, c := range c.Containers {
				ids = append(ids, c.GetId())
			}
		}
		var want []string
		large := 0
		for _, p := range pods {
			want = append(want, p.GetId())
			if proto.Size(p) > limit {
				large++
			}
		}
		for _, c := range containers {
			want = append(want, c.GetId())
			if proto.Size(c) > limit {
				large++
			}
		}
		if strings.Join(ids, " ") != strings.Join(want, " ") {
			t.Fatalf("chunks have %v, want %v", ids, want)
		}
		if len(slim) < large {
			t.Fatalf("%d objects are reported as slim, at least %d are too large", len(slim), large)
		}
	})
}

func TestNotice(t *testing.T) {
	t.Parallel()
	big := &nri.Container{Id: "c", Env: []string{strings.Repeat("x", 5000)}}
	stop := &nri.StopContainerRequest{Container: big}
	got, ok := fit.Notice(stop, 1000).(*nri.StopContainerRequest)
	if !ok || got.GetContainer().GetId() != "c" || proto.Size(got) > 1000 {
		t.Errorf("notice is %v", got)
	}
	if len(big.GetEnv()) != 1 {
		t.Error("the container was changed")
	}
	create := &nri.CreateContainerRequest{Container: big}
	if fit.Notice(create, 1000) != proto.Message(create) {
		t.Error("a request for adjustments was cut; the plugin would work on half of it")
	}
	if fit.Notice(stop, 1<<20) != proto.Message(stop) {
		t.Error("a notice that fits was changed")
	}
}
