package command

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/pelletier/go-toml/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// runcTypes are the types of the shims that take the options of runc.
var runcTypes = [...]string{"io.containerd.runc.", "io.containerd.crisp."}

// TakesRuncOptions says whether a type of shim takes the options of runc, those of a
// checkpoint included.
func TakesRuncOptions(runtimeType string) bool {
	for _, prefix := range runcTypes {
		if strings.HasPrefix(runtimeType, prefix) {
			return true
		}
	}
	return false
}

// Options encodes the runtime options of a handler for its shim; nil if it has none.
func Options(h pod.Handler) (*anypb.Any, error) {
	var options proto.Message
	switch {
	case TakesRuncOptions(h.RuntimeType):
		o, err := runcOptions(h)
		if err != nil {
			return nil, fmt.Errorf("options of runtime handler %q: %w: %w", h.Name, err, errdefs.ErrInvalidArgument)
		}
		options = o
	case len(h.Options) == 0:
		return nil, nil
	default:
		o, err := genericOptions(h.Options)
		if err != nil {
			return nil, fmt.Errorf("options of runtime handler %q: %w: %w", h.Name, err, errdefs.ErrInvalidArgument)
		}
		options = o
	}
	encoded, err := typeurl.MarshalAnyToProto(options)
	if err != nil {
		return nil, fmt.Errorf("options of runtime handler %q: %w", h.Name, err)
	}
	return encoded, nil
}

// runcOptions are the options of runc by their names in containerd's configuration. Those that
// are keys of the handler, or of the node, are set there alone.
func runcOptions(h pod.Handler) (*runcoptions.Options, error) {
	elsewhere := map[string]string{"BinaryName": "binary_name", "Root": "runtime_root", "SystemdCgroup": "runtime.cgroup_driver"}
	for _, name := range slices.Sorted(maps.Keys(h.Options)) {
		if key, ok := elsewhere[name]; ok {
			return nil, fmt.Errorf("%s is set by %s", name, key)
		}
	}
	text, err := toml.Marshal(h.Options)
	if err != nil {
		return nil, err
	}
	o := &runcoptions.Options{}
	err = toml.NewDecoder(bytes.NewReader(text)).DisallowUnknownFields().Decode(o)
	if unknown, ok := errors.AsType[*toml.StrictMissingError](err); ok {
		return nil, fmt.Errorf("unknown to shims for runc:\n%s", unknown.String())
	}
	if err != nil {
		return nil, err
	}
	o.BinaryName, o.Root, o.SystemdCgroup = h.BinaryName, h.Root, h.SystemdCgroup
	return o, nil
}

// genericOptions passes a configuration to a shim whose options are not known here: either
// the keys TypeUrl, ConfigPath and ConfigBody, or all of it as a TOML document.
func genericOptions(in map[string]any) (*runtimeoptions.Options, error) {
	o := &runtimeoptions.Options{}
	text := map[string]*string{"TypeUrl": &o.TypeUrl, "ConfigPath": &o.ConfigPath}
	rest := map[string]any{}
	for k, v := range in {
		s, isText := v.(string)
		switch field := text[k]; {
		case field != nil && isText:
			*field = s
		case k == "ConfigBody" && isText:
			o.ConfigBody = []byte(s)
		case field != nil || k == "ConfigBody":
			return nil, fmt.Errorf("%s is not a string", k)
		default:
			rest[k] = v
		}
	}
	if len(rest) == 0 {
		return o, nil
	}
	if o.ConfigBody != nil || o.GetConfigPath() != "" {
		return nil, errors.New("has keys beside ConfigPath or ConfigBody")
	}
	body, err := toml.Marshal(rest)
	if err != nil {
		return nil, err
	}
	o.ConfigBody = body
	return o, nil
}

// Binary finds the shim's binary of a handler: the one that it names, or that of its type
// beside this program, or in PATH. It fails with ErrFailedPrecondition if there
// is none and with ErrInvalidArgument if the type of the shim has no such form as
// "io.containerd.runc.v2".
func Binary(h pod.Handler) (string, error) {
	if h.ShimPath != "" {
		if !filepath.IsAbs(h.ShimPath) {
			return "", fmt.Errorf("shim path %q of runtime handler %q is not absolute: %w", h.ShimPath, h.Name, errdefs.ErrInvalidArgument)
		}
		return h.ShimPath, nil
	}
	parts := strings.Split(h.RuntimeType, ".")
	if len(parts) < 2 || parts[0] == "" || strings.Contains(h.RuntimeType, "/") {
		return "", fmt.Errorf("runtime type %q of runtime handler %q: %w", h.RuntimeType, h.Name, errdefs.ErrInvalidArgument)
	}
	name := fmt.Sprintf("containerd-shim-%s-%s", parts[len(parts)-2], parts[len(parts)-1])
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("shim of runtime handler %q: %w", h.Name, err)
	}
	path, err := exec.LookPath(filepath.Join(filepath.Dir(self), name))
	if err == nil {
		return path, nil
	}
	path, err = exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("shim of runtime handler %q: %w: %w", h.Name, err, errdefs.ErrFailedPrecondition)
	}
	return filepath.Abs(path)
}
