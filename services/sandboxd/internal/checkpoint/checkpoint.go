// Package checkpoint is the form of checkpoints on disk.
//
// A container checkpoint is a tar archive as other runtimes and checkpointctl know it: the
// CRIU images in checkpoint/, config.dump, spec.dump, dump.log, rootfs-diff.tar and, if the
// image declares volumes, volumes/. A pod checkpoint is a folder with pod.dump and, in
// containers/<name>/, the same files of each container. pod.dump is written last: a folder
// without it is no checkpoint.
//
// The package reads and writes files and knows no process. It never follows a symbolic link
// out of a pod checkpoint that it reads.
package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	metadata "github.com/checkpoint-restore/checkpointctl/lib"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protojson"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
)

const (
	// version of the form of pod checkpoints.
	version = 1
	// containers is the folder of the containers in a pod checkpoint.
	containers = "containers"
	// maxDump bounds what is read of pod.dump.
	maxDump = 16 << 20
)

// Pod describes a pod checkpoint.
type Pod struct {
	Version        int       `json:"version"`
	CheckpointedAt time.Time `json:"checkpointedTime"`
	// Architecture of the node, in Go's words.
	Architecture string `json:"architecture"`
	// RuntimeType is the shim's type, RuntimeBinary the OCI runtime that it was told to drive.
	RuntimeType   string `json:"runtimeType"`
	RuntimeBinary string `json:"runtimeBinary,omitempty"`
	// Sandbox is the sandbox's configuration, a CRI message in JSON.
	Sandbox    json.RawMessage `json:"sandbox"`
	Containers []Container     `json:"containers"`
}

// Container describes one container of a pod checkpoint.
type Container struct {
	Name    string `json:"name"`
	ID      string `json:"id"`
	ImageID string `json:"imageId"`
	// Config is the container's configuration, a CRI message in JSON.
	Config json.RawMessage `json:"config"`
}

// NewPod describes a checkpoint of containers of a sandbox that is taken now.
func NewPod(runtimeType, runtimeBinary string, sandbox *criv1.PodSandboxConfig, list []*recordv1.Container) (Pod, error) {
	p := Pod{
		Version: version, CheckpointedAt: time.Now().UTC(), Architecture: runtime.GOARCH,
		RuntimeType: runtimeType, RuntimeBinary: runtimeBinary,
	}
	var err error
	p.Sandbox, err = protojson.Marshal(sandbox)
	if err != nil {
		return Pod{}, err
	}
	for _, rec := range list {
		cfg, err := protojson.Marshal(rec.GetConfig())
		if err != nil {
			return Pod{}, err
		}
		p.Containers = append(p.Containers, Container{
			Name: rec.GetConfig().GetMetadata().GetName(), ID: rec.GetId(), ImageID: rec.GetImageId(), Config: cfg,
		})
	}
	return p, nil
}

// Write writes the description, which makes the folder a checkpoint.
func (p Pod) Write(dir string) error {
	b, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(filepath.Join(dir, metadata.PodDumpFile), b)
}

// Read reads the description of a pod checkpoint. Errors: ErrNotFound for a folder that is
// not there, ErrFailedPrecondition for what this version cannot restore.
func Read(dir string) (Pod, error) {
	root, err := openRoot(dir)
	if err != nil {
		return Pod{}, err
	}
	defer func() { _ = root.Close() }() // only read
	f, err := root.Open(metadata.PodDumpFile)
	if err != nil {
		return Pod{}, fmt.Errorf("%s is no pod checkpoint: %w: %w", dir, errdefs.ErrFailedPrecondition, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxDump))
	if err != nil {
		return Pod{}, err
	}
	var p Pod
	err = json.Unmarshal(b, &p)
	switch {
	case err != nil:
		return Pod{}, fmt.Errorf("%s of checkpoint %s: %w: %w", metadata.PodDumpFile, dir, errdefs.ErrFailedPrecondition, err)
	case p.Version != version:
		return Pod{}, fmt.Errorf("checkpoint %s has version %d, known is %d: %w", dir, p.Version, version, errdefs.ErrFailedPrecondition)
	case p.Architecture != runtime.GOARCH:
		return Pod{}, fmt.Errorf("checkpoint %s is of a node of architecture %q, this one is %q: %w",
			dir, p.Architecture, runtime.GOARCH, errdefs.ErrFailedPrecondition)
	}
	return p, nil
}

func openRoot(dir string) (*os.Root, error) {
	root, err := os.OpenRoot(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("checkpoint %s: %w", dir, errdefs.ErrNotFound)
	case err != nil:
		return nil, fmt.Errorf("checkpoint %s: %w: %w", dir, errdefs.ErrFailedPrecondition, err)
	}
	return root, nil
}

// Dir is the folder of a container in a pod checkpoint.
func Dir(dir, name string) string { return filepath.Join(dir, containers, name) }

// Images is the folder of the CRIU images among a container's files.
func Images(dir string) string { return filepath.Join(dir, metadata.CheckpointDirectory) }

// RootfsDiff is the file of the changes to the root file system among a container's files.
func RootfsDiff(dir string) string { return filepath.Join(dir, metadata.RootFsDiffTar) }

// Volumes is the folder of the image's volumes among a container's files.
func Volumes(dir string) string { return filepath.Join(dir, metadata.CheckpointVolumesDirectory) }

// WriteDumps writes what other tools read of a container: config.dump and spec.dump.
func WriteDumps(dir string, rec *recordv1.Container, runtimeType string) error {
	cfg := metadata.ContainerConfig{
		ID: rec.GetId(), Name: rec.GetConfig().GetMetadata().GetName(),
		RootfsImage: rec.GetConfig().GetImage().GetImage(), RootfsImageRef: rec.GetImageId(), RootfsImageName: rec.GetImageRef(),
		OCIRuntime: runtimeType, CreatedTime: rec.GetCreatedAt().AsTime(), CheckpointedAt: time.Now().UTC(),
	}
	b, err := json.MarshalIndent(cfg, "", "  ")
	if err != nil {
		return err
	}
	return errors.Join(writeFile(filepath.Join(dir, metadata.ConfigDumpFile), b),
		writeFile(filepath.Join(dir, metadata.SpecDumpFile), rec.GetSpec()))
}

// writeFile writes a file that is not there yet, and syncs it.
func writeFile(path string, content []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// CheckOutput says whether a pod checkpoint can be written into a folder.
// Errors: ErrInvalidArgument, ErrNotFound, ErrFailedPrecondition.
func CheckOutput(dir string) error {
	if !filepath.IsAbs(dir) {
		return fmt.Errorf("output_path %q must be absolute: %w", dir, errdefs.ErrInvalidArgument)
	}
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("output_path %s: %w", dir, errdefs.ErrNotFound)
	case errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf("output_path %s is not a folder: %w", dir, errdefs.ErrInvalidArgument)
	case err != nil:
		return fmt.Errorf("output_path: %w: %w", errdefs.ErrFailedPrecondition, err)
	case len(entries) > 0:
		return fmt.Errorf("output_path %s is not empty: %w", dir, errdefs.ErrFailedPrecondition)
	}
	probe := filepath.Join(dir, containers)
	err = os.Mkdir(probe, 0o700)
	if err != nil {
		return fmt.Errorf("output_path %s is not writable: %w: %w", dir, errdefs.ErrFailedPrecondition, err)
	}
	return os.Remove(probe)
}

// Clear empties the folder of a pod checkpoint that failed.
func Clear(dir string) error {
	return errors.Join(os.RemoveAll(filepath.Join(dir, metadata.PodDumpFile)), os.RemoveAll(filepath.Join(dir, containers)))
}
