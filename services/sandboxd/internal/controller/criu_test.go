package controller_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/controller"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

func TestCheckpointReadySaysWhatIsWrongWithCRIU(t *testing.T) {
	tasks := controller.NewTasks(nil)
	runc, other := pod.Handler{RuntimeType: "io.containerd.runc.v2"}, pod.Handler{RuntimeType: "io.containerd.runsc.v1"}
	for _, tc := range []struct {
		name, script string // empty for no criu
		handler      pod.Handler
		want         string // in the error; empty for none
	}{
		{"missing", "", runc, "not in PATH"},
		{"missing and not needed", "", other, ""},
		{"broken", "echo one; echo 'Error: no vdso' >&2; exit 1", runc, "no vdso"},
		{"good", `[ "$1" = check ]`, runc, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			t.Setenv("PATH", dir)
			if tc.script != "" {
				err := os.WriteFile(filepath.Join(dir, "criu"), []byte("#!/bin/sh\n"+tc.script+"\n"), 0o700)
				if err != nil {
					t.Fatal(err)
				}
			}
			err := tasks.CheckpointReady(t.Context(), tc.handler)
			if tc.want == "" && err != nil {
				t.Errorf("%v", err)
			}
			if tc.want != "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("%v, want FailedPrecondition with %q", err, tc.want)
			}
		})
	}
}
