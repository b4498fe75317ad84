package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/bundle"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/link"
)

const (
	// endpointFile has the name that containerd gives it, too.
	endpointFile = "bootstrap.json"
	// maxAnswer is what a shim may print when it starts.
	maxAnswer = 64 << 10
	// maxAddress is longer than any address of a socket can be.
	maxAddress = 512
)

// params encodes what a shim reads from its standard input when it starts.
func (r *Runner) params(id string, options *anypb.Any) ([]byte, error) {
	p := &bootapi.BootstrapParams{
		InstanceID:             id,
		Namespace:              pod.Namespace,
		ContainerdVersion:      r.cfg.Version,
		ContainerdTtrpcAddress: r.cfg.EventsSocket,
		ContainerdGrpcAddress:  r.cfg.Address,
		ContainerdBinary:       r.binary,
	}
	if r.cfg.Debug {
		p.LogLevel = bootapi.LogLevel_LOG_LEVEL_DEBUG
	}
	if r.cfg.SocketDir != "" {
		p.SocketDir = &r.cfg.SocketDir
	}
	if options != nil {
		if err := p.AddExtension(options); err != nil {
			return nil, err
		}
	}
	return proto.Marshal(p)
}

// parseAnswer reads what a shim printed when it started: a BootstrapResult, its JSON form,
// or just an address, which is how shims before version 3 answer.
func parseAnswer(answer []byte) (link.Endpoint, error) {
	var result bootapi.BootstrapResult
	if proto.Unmarshal(answer, &result) == nil && result.GetVersion() > 0 && result.GetAddress() != "" {
		return endpoint(&result)
	}
	text := bytes.TrimSpace(answer)
	var fromJSON bootapi.BootstrapResult
	if err := json.Unmarshal(text, &fromJSON); err == nil && fromJSON.GetVersion() >= 2 {
		return endpoint(&fromJSON)
	}
	return endpoint(&bootapi.BootstrapResult{Version: 2, Address: string(text), Protocol: link.ProtocolTTRPC})
}

func endpoint(r *bootapi.BootstrapResult) (link.Endpoint, error) {
	e := link.Endpoint{
		Version:  int(r.GetVersion()),
		Address:  r.GetAddress(),
		Protocol: strings.ToLower(r.GetProtocol()),
	}
	if e.Protocol == "" {
		e.Protocol = link.ProtocolTTRPC
	}
	switch {
	case e.Version != 2 && e.Version != 3:
		return e, fmt.Errorf("shim version %d: %w", e.Version, errdefs.ErrNotImplemented)
	case e.Protocol != link.ProtocolTTRPC && e.Protocol != link.ProtocolGRPC:
		return e, fmt.Errorf("shim protocol %.32q: %w", e.Protocol, errdefs.ErrNotImplemented)
	case e.Protocol == link.ProtocolGRPC && e.Version != 3:
		return e, fmt.Errorf("shim version %d over grpc: %w", e.Version, errdefs.ErrNotImplemented)
	case !plausibleAddress(e.Address):
		return e, fmt.Errorf("shim answered %.64q, which is no address: %w", e.Address, errdefs.ErrInternal)
	}
	return e, nil
}

// plausibleAddress keeps rubbish from being taken for the address of an old shim.
func plausibleAddress(a string) bool {
	if a == "" || len(a) > maxAddress || !strings.Contains(a, "/") {
		return false
	}
	return !strings.ContainsFunc(a, func(r rune) bool { return r <= ' ' || r > '~' })
}

// SaveEndpoint saves in a bundle where its shim listens, in the form of an answer.
func SaveEndpoint(dir string, e link.Endpoint) error {
	data, err := json.Marshal(&bootapi.BootstrapResult{
		Version: int32(e.Version), Address: e.Address, Protocol: e.Protocol,
	})
	if err != nil {
		return err
	}
	return bundle.WriteFile(filepath.Join(dir, endpointFile), data)
}

// LoadEndpoint reads what SaveEndpoint saved. Errors: those of a bad answer, ErrNotFound.
func LoadEndpoint(dir string) (link.Endpoint, error) {
	data, err := bundle.ReadFile(filepath.Join(dir, endpointFile), maxAnswer)
	if err != nil {
		return link.Endpoint{}, err
	}
	return parseAnswer(data)
}
