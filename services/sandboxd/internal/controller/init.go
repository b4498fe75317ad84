package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/bundle"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/command"
)

const (
	// killTimeout bounds the end of a process after SIGKILL.
	killTimeout = 5 * time.Second
	// initFile holds what Start needs of the sandbox's init process.
	initFile      = "init.json"
	maxInitFile   = 1 << 20
	statusStopped = "stopped"
)

// initTask is what is kept between Create and Start.
type initTask struct {
	Handler pod.Handler   `json:"handler"`
	Rootfs  []mount.Mount `json:"rootfs"`
}

// saveInit notes in the bundle that the sandbox has an init process.
func saveInit(b bundle.Pod, spec port.SandboxSpec) error {
	data, err := json.Marshal(initTask{Handler: spec.Handler, Rootfs: spec.InitRootfs})
	if err != nil {
		return err
	}
	if err := bundle.WriteFile(filepath.Join(b.Dir(), initFile), data); err != nil {
		return err
	}
	return b.MarkInit()
}

// startInit creates and starts the sandbox's init process, whose task has the sandbox's id
// and uses the sandbox's bundle.
func (t *Tasks) startInit(ctx context.Context, i *shim.Instance) (uint32, error) {
	data, err := bundle.ReadFile(filepath.Join(i.Bundle().Dir(), initFile), maxInitFile)
	if err != nil {
		return 0, err
	}
	var init initTask
	if err := json.Unmarshal(data, &init); err != nil {
		return 0, fmt.Errorf("%s: %w: %w", initFile, err, errdefs.ErrDataLoss)
	}
	options, err := command.Options(init.Handler)
	if err != nil {
		return 0, err
	}
	spec := port.TaskSpec{SandboxID: i.ID(), ContainerID: i.ID(), Rootfs: init.Rootfs}
	if _, err := t.create(ctx, i, i.Bundle().Dir(), spec, options); err != nil {
		return 0, err
	}
	return t.Start(ctx, i.ID(), i.ID(), "")
}

// endInit kills and deletes the sandbox's init process, so that the shim can end by itself.
// What goes wrong is put right by the clean-up after the shim.
func (t *Tasks) endInit(ctx context.Context, i *shim.Instance) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
	defer cancel()
	if err := t.Kill(ctx, i.ID(), i.ID(), "", syscall.SIGKILL, true); err != nil {
		return
	}
	if _, err := t.Wait(ctx, i.ID(), i.ID(), ""); err != nil {
		return
	}
	_, _ = t.Delete(ctx, i.ID(), i.ID(), "")
}
