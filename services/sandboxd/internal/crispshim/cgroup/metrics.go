package cgroup

import (
	"fmt"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// Metrics reads the metrics of the group, in the messages that tools for containerd know. It
// fails with ErrNotFound if there is no group.
func (g Group) Metrics() (*anypb.Any, error) {
	var m proto.Message
	switch {
	case g.main() == "":
		return nil, fmt.Errorf("cgroup: %w", errdefs.ErrNotFound)
	case g.Unified():
		m = g.metricsV2()
	default:
		m = g.metricsV1()
	}
	data, err := proto.Marshal(m)
	if err != nil {
		return nil, err
	}
	return &anypb.Any{TypeUrl: string(m.ProtoReflect().Descriptor().FullName()), Value: data}, nil
}
