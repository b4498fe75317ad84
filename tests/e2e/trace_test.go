//go:build integration

package e2e

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// span is what the stories look at.
type span struct {
	service, name     string
	trace, id, parent string
}

// receiver is an OTLP collector that keeps what it gets.
type receiver struct {
	collector.UnimplementedTraceServiceServer

	mu    sync.Mutex
	spans []span
}

func (r *receiver) Export(_ context.Context, request *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, resource := range request.GetResourceSpans() {
		service := ""
		for _, a := range resource.GetResource().GetAttributes() {
			if a.GetKey() == "service.name" {
				service = a.GetValue().GetStringValue()
			}
		}
		for _, scope := range resource.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				r.spans = append(r.spans, convert(service, s))
			}
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

func convert(service string, s *tracepb.Span) span {
	return span{service, s.GetName(), hex.EncodeToString(s.GetTraceId()), hex.EncodeToString(s.GetSpanId()), hex.EncodeToString(s.GetParentSpanId())}
}

// of gives the spans of one trace.
func (r *receiver) of(trace string) []span {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(r.spans), func(s span) bool { return s.trace != trace })
}

// listen starts a receiver for the length of the test and gives its address.
func listen(t *testing.T) (*receiver, string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	server := grpc.NewServer()
	r := &receiver{}
	collector.RegisterTraceServiceServer(server, r)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-done; err != nil {
			t.Errorf("receiver: %v", err)
		}
	})
	return r, listener.Addr().String()
}

// path is a chain of spans from the top, as service and a part of the name.
type path [][2]string

// follows says whether the trace has such a chain below the given parent; spans
// in between that the chain does not name are allowed.
func follows(spans []span, parent string, p path) bool {
	if len(p) == 0 {
		return true
	}
	for _, s := range spans {
		if s.parent != parent {
			continue
		}
		matches := s.service == p[0][0] && strings.Contains(s.name, p[0][1])
		if matches && follows(spans, s.id, p[1:]) || follows(spans, s.id, p) {
			return true
		}
	}
	return false
}

// show prints a trace as a tree.
func show(spans []span, parent, indent string) string {
	var text strings.Builder
	for _, s := range spans {
		if s.parent == parent {
			fmt.Fprintf(&text, "%s%s: %s\n%s", indent, s.service, s.name, show(spans, s.id, indent+"  "))
		}
	}
	return text.String()
}

// One trace goes from the caller through all processes, for each main call.
func TestOneTracePerCallThroughAllProcesses(t *testing.T) {
	r, address := listen(t)
	s := start(t, testenv.Setup{TraceEndpoint: address, Handler: testenv.HandlerCrisp})
	s.pull(busybox)
	p := &plugin{}
	p.connect(t, s, "10", "traced")

	const callersSpan = "00f067aa0ba902b7"
	traced := func(n int) (context.Context, string) {
		trace := fmt.Sprintf("4bf92f3577b34da6a3ce929d0e0e47%02d", n)
		return metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+trace+"-"+callersSpan+"-01"), trace
	}
	check := func(trace string, paths ...path) {
		t.Helper()
		for _, want := range paths {
			eventually(t, "trace", func() error {
				spans := r.of(trace)
				if !follows(spans, callersSpan, want) {
					return fmt.Errorf("no chain %v in\n%s", want, show(spans, callersSpan, "  "))
				}
				return nil
			})
		}
		// Everything of the trace hangs together.
		spans := r.of(trace)
		for _, s := range spans {
			known := s.parent == callersSpan || slices.ContainsFunc(spans, func(o span) bool { return o.id == s.parent })
			if !known {
				t.Errorf("the parent of %s: %s is not in the trace", s.service, s.name)
			}
		}
	}
	gateway, sandboxd, hub := string(testenv.Gateway), string(testenv.Sandboxd), string(testenv.NRIHub)

	config := s.podConfig("traced")
	ctx, trace := traced(1)
	pod, err := s.CRI.RunPodSandbox(ctx, &criv1.RunPodSandboxRequest{Config: config})
	must(t, err)
	check(trace,
		path{{gateway, "RunPodSandbox"}, {sandboxd, "PrepareSandbox"}, {sandboxd, "network."}},
		path{{gateway, "RunPodSandbox"}, {sandboxd, "PrepareSandbox"}, {sandboxd, "shim.start"}},
		// The shim makes no spans, to stay small: the calls to it are those of sandboxd.
		path{{gateway, "RunPodSandbox"}, {sandboxd, "PrepareSandbox"}, {sandboxd, "StartSandbox"}},
		path{{gateway, "RunPodSandbox"}, {hub, "RunPodSandbox"}},
		path{{gateway, "RunPodSandbox"}, {sandboxd, "CommitSandbox"}},
	)

	ctx, trace = traced(2)
	created, err := s.CRI.CreateContainer(ctx, &criv1.CreateContainerRequest{PodSandboxId: pod.GetPodSandboxId(), Config: containerConfig("main", "sleep 1000"), SandboxConfig: config})
	must(t, err)
	check(trace,
		path{{gateway, "CreateContainer"}, {sandboxd, "PrepareContainer"}},
		path{{gateway, "CreateContainer"}, {hub, "CreateContainer"}, {hub, "nri.plugin"}},
		path{{gateway, "CreateContainer"}, {sandboxd, "CommitContainer"}},
	)

	ctx, trace = traced(3)
	_, err = s.CRI.StartContainer(ctx, &criv1.StartContainerRequest{ContainerId: created.GetContainerId()})
	must(t, err)
	check(trace,
		path{{gateway, "StartContainer"}, {hub, "StartContainer"}, {hub, "nri.plugin"}},
		path{{gateway, "StartContainer"}, {sandboxd, "CreateTask"}, {sandboxd, "create_task"}, {sandboxd, "Task/Create"}},
		path{{gateway, "StartContainer"}, {sandboxd, "StartContainer"}, {sandboxd, "start_task"}, {sandboxd, "Task/Start"}},
	)
	// The news of the start carries the trace on.
	for _, n := range s.waitNews(created.GetContainerId(), wholeLife[:2]...) {
		if !strings.Contains(n.trace, trace) {
			t.Errorf("%s carries the trace %q, want %s", n.topic, n.trace, trace)
		}
	}
}
