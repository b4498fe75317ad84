package service

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"strconv"
	"strings"

	sandboxapi "github.com/containerd/containerd/api/runtime/sandbox/v1"
	"github.com/containerd/errdefs"
)

// fieldSpec is the field of a sandbox that can be changed.
const fieldSpec = "spec"

// UpdateSandbox changes the annotations and the resources of the sandbox, which the status
// tells. The resources are put in force for its own process; without one the sandbox uses
// nothing itself, and the cgroup above its containers is the caller's. It fails with
// ErrNotImplemented for other fields than the specification.
func (s *Services) UpdateSandbox(ctx context.Context, r *sandboxapi.UpdateSandboxRequest) (*sandboxapi.UpdateSandboxResponse, error) {
	b, err := s.sandboxOf(r.GetSandboxID())
	if err != nil {
		return nil, err
	}
	change, err := changeOf(r)
	if err != nil {
		return nil, fmt.Errorf("update of sandbox %q: %w", b.id, err)
	}
	b.mu.Lock()
	init := b.init
	b.mu.Unlock()
	if init != nil && change.Linux.Resources != nil {
		if err := init.Update(ctx, change.Linux.Resources); err != nil {
			return nil, err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.annotations == nil {
		b.annotations = map[string]string{}
	}
	maps.Copy(b.annotations, change.Annotations)
	if change.Linux.Resources != nil {
		b.resources = change.Linux.Resources
	}
	return &sandboxapi.UpdateSandboxResponse{}, nil
}

// change is the part of a specification that an update takes; what is absent is unchanged.
type change struct {
	Annotations map[string]string `json:"annotations"`
	Linux       struct {
		Resources json.RawMessage `json:"resources"`
	} `json:"linux"`
}

func changeOf(r *sandboxapi.UpdateSandboxRequest) (change, error) {
	var c change
	for _, f := range r.GetFields() {
		if f != fieldSpec && !strings.HasPrefix(f, fieldSpec+".") {
			return c, fmt.Errorf("field %q: %w", f, errdefs.ErrNotImplemented)
		}
	}
	spec := r.GetSandbox().GetSpec()
	if spec == nil {
		return c, nil
	}
	if err := json.Unmarshal(spec.GetValue(), &c); err != nil {
		return c, fmt.Errorf("specification: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return c, nil
}

// info is the verbose part of the sandbox's status.
func (s *Services) info(b *sandbox) map[string]string {
	out := map[string]string{
		"shim_pid": strconv.Itoa(os.Getpid()), "containers": strconv.Itoa(len(s.all())), "own_process": strconv.FormatBool(b.hasInit),
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.resources != nil {
		out["resources"] = string(b.resources)
	}
	if data, err := json.Marshal(b.annotations); err == nil && len(b.annotations) > 0 {
		out["annotations"] = string(data)
	}
	return out
}
