package validate

import (
	"fmt"
	"math"
	"path/filepath"
	"strings"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// CreateContainer checks a request for a new container.
func CreateContainer(req *criv1.CreateContainerRequest) error {
	if err := ID("pod_sandbox_id", req.GetPodSandboxId()); err != nil {
		return err
	}
	config := req.GetConfig()
	if config == nil {
		return invalid("config", "must be set")
	}
	if config.GetMetadata() == nil {
		return invalid("config.metadata", "must be set")
	}
	if req.GetSandboxConfig() == nil {
		return invalid("sandbox_config", "must be set")
	}
	return firstError(
		name("config.metadata.name", config.GetMetadata().GetName()),
		Image("config.image", config.GetImage()),
		sandboxMetadata("sandbox_config.metadata", req.GetSandboxConfig().GetMetadata()),
		logDirectory("sandbox_config.log_directory", req.GetSandboxConfig().GetLogDirectory()),
		logPath(req.GetSandboxConfig().GetLogDirectory(), config.GetLogPath()),
		envs("config.envs", config.GetEnvs()),
		mounts("config.mounts", config.GetMounts()),
		devices("config.devices", config.GetDevices()),
		cdiDevices("config.CDI_devices", config.GetCDIDevices()),
		linuxContainer("config.linux", config.GetLinux()),
		description("config", config.GetImage(), config.GetLabels(), config.GetAnnotations()),
		absent("config.windows", config.GetWindows()),
		Message(req),
	)
}

// logPath refuses every path that would not end up inside the log directory. The
// runtime writes logs as root, and the path comes with the pod.
func logPath(dir, path string) error {
	const field = "config.log_path"
	if path == "" {
		return nil
	}
	if dir == "" {
		return invalid(field, "must be empty without sandbox_config.log_directory")
	}
	if filepath.IsAbs(path) {
		return invalid(field, "must be relative to the log directory")
	}
	joined := filepath.Join(dir, path)
	if !strings.HasPrefix(joined, strings.TrimSuffix(filepath.Clean(dir), "/")+"/") {
		return invalid(field, "must stay inside the log directory")
	}
	if hasDotDot(path) || strings.HasSuffix(path, "/") {
		return invalid(field, "must be the plain path of a file")
	}
	return firstError(pathLength(field, joined), printable(field, path))
}

// pathLength refuses what the kernel takes for no path.
func pathLength(field, path string) error {
	if len(path) > maxPath {
		return invalid(field, "must not be longer than %d bytes", maxPath)
	}
	for element := range strings.SplitSeq(path, "/") {
		if len(element) > maxName {
			return invalid(field, "must not have an element longer than %d bytes", maxName)
		}
	}
	return nil
}

func envs(field string, envs []*criv1.KeyValue) error {
	for i, env := range envs {
		at := fmt.Sprintf("%s[%d]", field, i)
		if env.GetKey() == "" {
			return invalid(at+".key", "must not be empty")
		}
		if strings.Contains(env.GetKey(), "=") {
			return invalid(at+".key", "must not contain an equals sign")
		}
	}
	return nil
}

func mounts(field string, mounts []*criv1.Mount) error {
	for i, m := range mounts {
		at := fmt.Sprintf("%s[%d]", field, i)
		if m.GetContainerPath() == "" {
			return invalid(at+".container_path", "must not be empty")
		}
		if m.GetImage() != nil && m.GetHostPath() != "" {
			return invalid(at, "must not have both image and host_path")
		}
		if image := m.GetImage(); image != nil && image.GetImage() != "" {
			if err := Image(at+".image", image); err != nil {
				return err
			}
		}
		if m.GetImageSubPath() != "" && m.GetImage().GetImage() == "" {
			return invalid(at+".image_sub_path", "must be empty without an image")
		}
		if hasDotDot(m.GetImageSubPath()) || filepath.IsAbs(m.GetImageSubPath()) {
			return invalid(at+".image_sub_path", "must be a path inside the image")
		}
		if err := firstError(
			pathLength(at+".container_path", m.GetContainerPath()),
			pathLength(at+".host_path", m.GetHostPath()),
			pathLength(at+".image_sub_path", m.GetImageSubPath()),
			idMappings(at, m),
		); err != nil {
			return err
		}
	}
	return nil
}

// idMappings checks by what the owners of a mount's files are shifted.
func idMappings(field string, m *criv1.Mount) error {
	if (len(m.GetUidMappings()) == 0) != (len(m.GetGidMappings()) == 0) {
		return invalid(field, "must have both uidMappings and gidMappings, or none")
	}
	return firstError(
		ranges(field+".uidMappings", m.GetUidMappings()),
		ranges(field+".gidMappings", m.GetGidMappings()),
	)
}

// ranges refuses mappings that the kernel does not take.
func ranges(field string, list []*criv1.IDMapping) error {
	if len(list) > maxRanges {
		return invalid(field, "must not be more than %d, are %d", maxRanges, len(list))
	}
	for i, m := range list {
		at := fmt.Sprintf("%s[%d]", field, i)
		length := uint64(m.GetLength())
		if length == 0 {
			return invalid(at+".length", "must not be 0")
		}
		if uint64(max(m.GetHostId(), m.GetContainerId()))+length > math.MaxUint32 {
			return invalid(at, "must end before id %d", uint32(math.MaxUint32))
		}
		for j, other := range list[:i] {
			if meet(m.GetHostId(), other.GetHostId(), length, other.GetLength()) || meet(m.GetContainerId(), other.GetContainerId(), length, other.GetLength()) {
				return invalid(at, "must not overlap %s[%d]", field, j)
			}
		}
	}
	return nil
}

// meet says whether two ranges of ids that begin at a and b have one in common.
func meet(a, b uint32, lengthA uint64, lengthB uint32) bool {
	return uint64(a) < uint64(b)+uint64(lengthB) && uint64(b) < uint64(a)+lengthA
}

func devices(field string, devices []*criv1.Device) error {
	for i, d := range devices {
		at := fmt.Sprintf("%s[%d]", field, i)
		if d.GetHostPath() == "" {
			return invalid(at+".host_path", "must not be empty")
		}
		if path := d.GetContainerPath(); path != "" && !filepath.IsAbs(path) {
			return invalid(at+".container_path", "must be an absolute path, is %q", path)
		}
		if strings.Trim(d.GetPermissions(), "rwm") != "" {
			return invalid(at+".permissions", "must be made of r, w and m, is %q", d.GetPermissions())
		}
		if err := firstError(pathLength(at+".container_path", d.GetContainerPath()), pathLength(at+".host_path", d.GetHostPath())); err != nil {
			return err
		}
	}
	return nil
}

func cdiDevices(field string, devices []*criv1.CDIDevice) error {
	for i, d := range devices {
		if d.GetName() == "" {
			return invalid(fmt.Sprintf("%s[%d].name", field, i), "must not be empty")
		}
	}
	return nil
}

func linuxContainer(field string, linux *criv1.LinuxContainerConfig) error {
	security := linux.GetSecurityContext()
	at := field + ".security_context"
	if security.GetRunAsUser() != nil && security.GetRunAsUsername() != "" {
		return invalid(at, "must not have both run_as_user and run_as_username")
	}
	if security.GetRunAsGroup() != nil && security.GetRunAsUser() == nil && security.GetRunAsUsername() == "" {
		return invalid(at+".run_as_group", "must come with run_as_user or run_as_username")
	}
	return firstError(
		resources(field+".resources", linux.GetResources()),
		paths(at+".masked_paths", security.GetMaskedPaths()),
		paths(at+".readonly_paths", security.GetReadonlyPaths()),
		namespaces(at+".namespace_options", security.GetNamespaceOptions()),
	)
}

func paths(field string, list []string) error {
	for i, path := range list {
		if !filepath.IsAbs(path) {
			return invalid(fmt.Sprintf("%s[%d]", field, i), "must be an absolute path, is %q", path)
		}
		if err := pathLength(fmt.Sprintf("%s[%d]", field, i), path); err != nil {
			return err
		}
	}
	return nil
}

// StopContainer checks a request to stop a container.
func StopContainer(req *criv1.StopContainerRequest) error {
	return firstError(
		ID("container_id", req.GetContainerId()),
		timeout("timeout", req.GetTimeout()),
	)
}

// UpdateContainerResources checks a request for new resources of a container.
func UpdateContainerResources(req *criv1.UpdateContainerResourcesRequest) error {
	return firstError(
		ID("container_id", req.GetContainerId()),
		resources("linux", req.GetLinux()),
		absent("windows", req.GetWindows()),
		Message(req),
	)
}

// ExecSync checks a request to run a command to its end.
func ExecSync(req *criv1.ExecSyncRequest) error {
	return firstError(
		ID("container_id", req.GetContainerId()),
		command(req.GetCmd()),
		timeout("timeout", req.GetTimeout()),
		Message(req),
	)
}

// Exec checks a request for an exec URL.
func Exec(req *criv1.ExecRequest) error {
	return firstError(
		ID("container_id", req.GetContainerId()),
		command(req.GetCmd()),
		streams(req.GetTty(), req.GetStdin(), req.GetStdout(), req.GetStderr()),
		Message(req),
	)
}

// Attach checks a request for an attach URL.
func Attach(req *criv1.AttachRequest) error {
	return firstError(
		ID("container_id", req.GetContainerId()),
		streams(req.GetTty(), req.GetStdin(), req.GetStdout(), req.GetStderr()),
	)
}

func command(cmd []string) error {
	if len(cmd) == 0 || cmd[0] == "" {
		return invalid("cmd", "must not be empty")
	}
	return nil
}

func streams(tty, stdin, stdout, stderr bool) error {
	if !stdin && !stdout && !stderr {
		return invalid("stdin, stdout, stderr", "at least one must be true")
	}
	if tty && stderr {
		return invalid("stderr", "must be false with a terminal")
	}
	return nil
}
