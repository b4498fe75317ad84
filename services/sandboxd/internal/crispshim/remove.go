package crispshim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/reaper"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/task"
)

// removeTime bounds the runtime's removal of a container.
const removeTime = 10 * time.Second

// killed is the exit of a container that was ended by its removal.
const killed = 128 + int(unix.SIGKILL)

// remove ends and removes what a dead shim left of a container, and prints how it ended.
func remove(ctx context.Context, i invocation, stdout io.Writer) error {
	bundle := i.bundle
	if bundle == "" {
		wd, err := os.Getwd()
		if err != nil {
			return err
		}
		bundle = wd
	}
	e := reaper.Exit{Pid: task.SavedPid(bundle), Status: killed, At: time.Now()}
	saved, err := task.SavedExit(bundle)
	switch {
	case err == nil:
		e = saved
	case !errdefs.IsNotFound(err):
		return err
	}
	if err := removeContainer(ctx, i.id, bundle); err != nil {
		return fmt.Errorf("container %q: %w", i.id, err)
	}
	data, err := proto.Marshal(&taskapi.DeleteResponse{
		Pid: uint32(e.Pid), ExitStatus: uint32(e.Status), ExitedAt: timestamppb.New(e.At),
	})
	if err != nil {
		return err
	}
	_, err = stdout.Write(data)
	return err
}

func removeContainer(ctx context.Context, id, bundle string) error {
	r, err := task.SavedRuntime(bundle)
	if errors.Is(err, fs.ErrNotExist) {
		// No container was created in this bundle.
		return nil
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, removeTime)
	defer cancel()
	err = r.Delete(ctx, bundle, id)
	rootfs := filepath.Join(bundle, "rootfs")
	if umountErr := mount.UnmountRecursive(rootfs, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); umountErr != nil && !errors.Is(umountErr, fs.ErrNotExist) {
		err = errors.Join(err, umountErr)
	}
	return err
}

func printVersion(stdout io.Writer) error {
	_, err := fmt.Fprintf(stdout, "%s %s\n", Name, version())
	return err
}

// version is the version of the module that the program was built from.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "unknown"
	}
	return info.Main.Version
}
