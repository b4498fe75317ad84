package command

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Features are what the OCI runtime behind a shim can do. What it does not tell it cannot.
type Features struct {
	// RecursiveReadOnly says that it makes whole mount trees read-only.
	RecursiveReadOnly bool
	// UserNamespaces says that it joins user namespaces and shifts the ids of mounts.
	UserNamespaces bool
}

// Features asks a handler's shim, within limit, what its OCI runtime can do; no shim stays. It
// fails with ErrFailedPrecondition if the shim or its runtime is not there.
func (r *Runner) Features(ctx context.Context, h pod.Handler, limit time.Duration) (Features, error) {
	binary, err := Binary(h)
	if err != nil {
		return Features{}, err
	}
	options, err := Options(h)
	if err != nil {
		return Features{}, err
	}
	var stdin []byte
	if options != nil {
		if stdin, err = proto.Marshal(options); err != nil {
			return Features{}, fmt.Errorf("options of runtime handler %q: %w", h.Name, err)
		}
	}
	answer, err := r.run(ctx, call{Shim: Shim{Path: binary}, action: "-info", stdin: stdin, limit: limit})
	if err != nil {
		return Features{}, err
	}
	return parseFeatures(answer)
}

// parseFeatures reads a RuntimeInfo message.
func parseFeatures(answer []byte) (Features, error) {
	var info types.RuntimeInfo
	if err := proto.Unmarshal(answer, &info); err != nil {
		return Features{}, fmt.Errorf("features of the runtime: %w: %w", err, errdefs.ErrDataLoss)
	}
	if info.GetFeatures() == nil {
		return Features{}, nil // the runtime has no command for it
	}
	var f features.Features
	if err := json.Unmarshal(info.GetFeatures().GetValue(), &f); err != nil {
		return Features{}, fmt.Errorf("features of the runtime: %w: %w", err, errdefs.ErrDataLoss)
	}
	out := Features{RecursiveReadOnly: slices.Contains(f.MountOptions, "rro")}
	if f.Linux == nil || f.Linux.MountExtensions == nil || f.Linux.MountExtensions.IDMap == nil {
		return out, nil
	}
	shifts := f.Linux.MountExtensions.IDMap.Enabled
	out.UserNamespaces = shifts != nil && *shifts && slices.Contains(f.Linux.Namespaces, string(specs.UserNamespace))
	return out, nil
}
