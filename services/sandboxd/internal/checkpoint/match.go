package checkpoint

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protojson"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Match says whether a pod may be restored with a configuration: the containers are those
// of the checkpoint by name, and what describes their processes is what they were started
// with. It returns the ids of the images by container name.
// Errors: ErrInvalidArgument naming the field.
func (p Pod) Match(sandbox *criv1.PodSandboxConfig, configs []*criv1.ContainerConfig) (images map[string]string, err error) {
	saved := &criv1.PodSandboxConfig{}
	err = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(p.Sandbox, saved)
	if err != nil {
		return nil, fmt.Errorf("sandbox of the checkpoint: %w: %w", errdefs.ErrFailedPrecondition, err)
	}
	if was, is := pod.IDMapOf(saved).String(), pod.IDMapOf(sandbox).String(); was != is {
		return nil, mismatch("config.linux.security_context.namespace_options.userns_options", was, is)
	}
	images = map[string]string{}
	byName := map[string]Container{}
	for _, c := range p.Containers {
		byName[c.Name] = c
	}
	for i, cfg := range configs {
		field, name := fmt.Sprintf("container_configs[%d]", i), cfg.GetMetadata().GetName()
		c, ok := byName[name]
		if _, twice := images[name]; twice || !ok {
			return nil, fmt.Errorf("%s.metadata.name %q: want each of the checkpoint's containers once: %w", field, name, errdefs.ErrInvalidArgument)
		}
		err := c.match(field, cfg)
		if err != nil {
			return nil, err
		}
		images[name] = c.ImageID
	}
	if len(images) != len(byName) {
		return nil, fmt.Errorf("container_configs: the checkpoint has %d containers, %d are configured: %w", len(byName), len(images), errdefs.ErrInvalidArgument)
	}
	return images, nil
}

func (c Container) match(field string, is *criv1.ContainerConfig) error {
	was := &criv1.ContainerConfig{}
	err := protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(c.Config, was)
	if err != nil {
		return fmt.Errorf("container %q of the checkpoint: %w: %w", c.Name, errdefs.ErrFailedPrecondition, err)
	}
	for _, f := range []struct {
		name string
		of   func(*criv1.ContainerConfig) string
	}{
		{"command", func(c *criv1.ContainerConfig) string { return fmt.Sprintf("%q", c.GetCommand()) }},
		{"args", func(c *criv1.ContainerConfig) string { return fmt.Sprintf("%q", c.GetArgs()) }},
		{"working_dir", (*criv1.ContainerConfig).GetWorkingDir},
		{"envs", environment},
		{"tty", func(c *criv1.ContainerConfig) string { return strconv.FormatBool(c.GetTty()) }},
		{"mounts", destinations},
		{"linux.security_context", credentials},
	} {
		if f.of(was) != f.of(is) {
			return mismatch(field+"."+f.name, f.of(was), f.of(is))
		}
	}
	return nil
}

func mismatch(field, was, is string) error {
	return fmt.Errorf("%s is not what the checkpointed process has: %s, want %s: %w", field, is, was, errdefs.ErrInvalidArgument)
}

func environment(c *criv1.ContainerConfig) string {
	var list []string
	for _, kv := range c.GetEnvs() {
		list = append(list, kv.GetKey()+"="+string(kv.GetValue()))
	}
	slices.Sort(list)
	return fmt.Sprintf("%q", list)
}

// destinations are the paths in the container at which something is mounted: a process may
// have any of them open.
func destinations(c *criv1.ContainerConfig) string {
	var list []string
	for _, m := range c.GetMounts() {
		list = append(list, m.GetContainerPath())
	}
	slices.Sort(list)
	return strings.Join(list, ", ")
}

func credentials(c *criv1.ContainerConfig) string {
	sc := c.GetLinux().GetSecurityContext()
	id := func(v *criv1.Int64Value) string {
		if v == nil {
			return "unset"
		}
		return strconv.FormatInt(v.GetValue(), 10)
	}
	return fmt.Sprintf("run_as_user %s, run_as_username %q, run_as_group %s, supplemental_groups %v",
		id(sc.GetRunAsUser()), sc.GetRunAsUsername(), id(sc.GetRunAsGroup()), sc.GetSupplementalGroups())
}
