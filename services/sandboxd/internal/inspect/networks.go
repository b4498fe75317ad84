package inspect

import (
	"context"
	"log/slog"
	"slices"
	"strings"

	"go.opentelemetry.io/otel/trace/noop"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/criview"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/inspect/rules"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/network"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// CheckNetworks asks the CNI plugins of all pods that are ready whether what they made is still
// there. root is the folder of the durable state, cni says where the plugins are.
func CheckNetworks(ctx context.Context, root string, cni network.Config) ([]rules.Finding, error) {
	attached, err := attachedPods(ctx, root)
	if err != nil {
		return nil, err
	}
	plugins := network.New(ctx, cni, slog.New(slog.DiscardHandler), noop.NewTracerProvider().Tracer(""))
	var found []rules.Finding
	for _, s := range attached {
		err := plugins.Check(ctx, pod.NetworkRequest{
			SandboxID: s.GetId(), Config: s.GetConfig(), NetnsPath: s.GetNetnsPath(), Handler: s.GetRuntimeHandler(),
		}, s.GetCniResult())
		if err != nil {
			found = append(found, rules.Finding{Rule: "network.check", ID: s.GetId(), Text: strings.ReplaceAll(err.Error(), "\n", "; ")})
		}
	}
	if len(found) == 0 {
		return nil, nil
	}
	// A pod that was stopped meanwhile is none of them.
	attached, err = attachedPods(ctx, root)
	return slices.DeleteFunc(found, func(f rules.Finding) bool {
		return !slices.ContainsFunc(attached, func(s *recordv1.Sandbox) bool { return s.GetId() == f.ID })
	}), err
}

func attachedPods(ctx context.Context, root string) ([]*recordv1.Sandbox, error) {
	rec, err := ReadRecords(ctx, root)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(rec.Sandboxes), func(s *recordv1.Sandbox) bool {
		return criview.SandboxState(s) != criv1.PodSandboxState_SANDBOX_READY || len(s.GetCniResult()) == 0
	}), nil
}
