package crispshim

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	"github.com/containerd/go-runc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// typeFeatures is how containerd names what an OCI runtime says that it can do.
const typeFeatures = "types.containerd.io/opencontainers/runtime-spec/1/features/Features"

// printInfo prints what the shim is, and what the OCI runtime can do that the options on
// stdin name, or the default one. It fails with ErrNotFound if there is no such runtime; one
// that does not say what it can do is no error.
func printInfo(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	info := &types.RuntimeInfo{Name: Name, Version: &types.RuntimeVersion{Version: version()}}
	data, err := io.ReadAll(io.LimitReader(stdin, maxParams))
	if err != nil {
		return fmt.Errorf("runtime options: %w", err)
	}
	var o options.Options
	if len(data) > 0 {
		info.Options = &anypb.Any{}
		if err := proto.Unmarshal(data, info.GetOptions()); err != nil {
			return fmt.Errorf("runtime options: %w: %w", errdefs.ErrInvalidArgument, err)
		}
		if err := proto.Unmarshal(info.GetOptions().GetValue(), &o); err != nil {
			return fmt.Errorf("runtime options: %w: %w", errdefs.ErrInvalidArgument, err)
		}
	}
	info.Features, err = features(ctx, &o)
	if err != nil {
		return err
	}
	data, err = proto.Marshal(info)
	if err != nil {
		return err
	}
	_, err = stdout.Write(data)
	return err
}

// features asks an OCI runtime what it can do; nil if it has no answer.
func features(ctx context.Context, o *options.Options) (*anypb.Any, error) {
	name := o.GetBinaryName()
	if name == "" {
		name = runc.DefaultCommand
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return nil, fmt.Errorf("runtime: %w: %w", errdefs.ErrNotFound, err)
	}
	said, err := exec.CommandContext(ctx, path, "features").Output()
	if err != nil || !json.Valid(said) {
		return nil, nil //nolint:nilerr,nilnil // not every runtime has the command
	}
	return &anypb.Any{TypeUrl: typeFeatures, Value: said}, nil
}
