//go:build integration

package e2e

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// fakeRuntime stands before runc and does what would need CRIU by itself: it writes a note
// as the state of the processes, and restores by running the program anew. It keeps a
// journal. While the file "slow" is there a checkpoint takes long, and with "broken" it fails.
const fakeRuntime = `#!/bin/sh
here=%[1]q runc=%[2]q
verb= image= work= skip= kept= id=
for a in "$@"; do
	case $skip in
	image) image=$a; skip=; continue;;
	work) work=$a; skip=; continue;;
	kept) kept="$kept $a"; skip=; continue;;
	esac
	case $a in
	--image-path) skip=image;;
	--work-path) skip=work;;
	--root|--log|--log-format|--bundle|--pid-file|--console-socket) kept="$kept $a"; skip=kept;;
	--leave-running|--tcp-established|--file-locks|--shell-job|--ext-unix-sk) ;;
	checkpoint|pause|resume) verb=$a;;
	restore) verb=$a; kept="$kept run";;
	*) kept="$kept $a"; id=$a;;
	esac
done
case $verb in
pause|resume)
	"$runc" "$@" || exit
	echo "$verb $id" >>"$here/journal";;
checkpoint)
	echo "checkpoint $id" >>"$here/journal"
	mkdir -p "$image" "$work" && echo "state of $id" >"$image/pages-1.img" && echo "log" >"$work/dump.log" || exit 1
	[ ! -e "$here/broken" ] || { echo "cannot capture this" >&2; exit 1; }
	[ ! -e "$here/slow" ] || exec sleep 60;;
restore)
	[ -e "$image/pages-1.img" ] || { echo "no state in $image" >&2; exit 1; }
	cat "$image/pages-1.img" >>"$here/restored"
	exec "$runc" $kept;;
*)
	exec "$runc" "$@";;
esac
`

// withCheckpoints starts a system whose OCI runtime can checkpoint.
func withCheckpoints(t *testing.T, handler string) (s *system, here string) {
	t.Helper()
	here = t.TempDir()
	root, err := testenv.Root()
	must(t, err)
	script := filepath.Join(here, "fake-runc")
	must(t, os.WriteFile(script, fmt.Appendf(nil, fakeRuntime, here, filepath.Join(root, ".bin", "runc")), 0o755))
	must(t, os.WriteFile(filepath.Join(here, "criu"), []byte("#!/bin/sh\n[ \"$1\" = check ]\n"), 0o755))
	t.Setenv("PATH", here+":"+os.Getenv("PATH"))
	return start(t, testenv.Setup{Handler: handler, Configure: func(p testenv.Process, settings testenv.Settings) {
		if p == testenv.Sandboxd {
			settings.Set("runtime.handlers."+handler+".binary_name", script)
		}
	}}), here
}

// journal reads the steps of the runtime, without ids.
func journal(t *testing.T, here string) []string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(here, "journal"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	var out []string
	for line := range strings.Lines(string(b)) {
		verb, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		out = append(out, verb)
	}
	return out
}

func TestCheckpointAndRestoreOfAPod(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		s, here := withCheckpoints(t, handler)
		s.pull(busybox)
		pod, config := s.pod("original")
		script := "test -e /mark && echo restored; touch /mark; exec sleep 1000"
		configs := []*criv1.ContainerConfig{containerConfig("one", script), containerConfig("two", script)}
		var ids []string
		for _, c := range configs {
			ids = append(ids, s.container(pod, config, c))
		}
		for _, id := range ids {
			eventually(t, "the mark is made", func() error { return s.try(id, "test", "-e", "/mark") })
		}
		dir := t.TempDir()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := s.CRI.CheckpointPod(ctx, &criv1.CheckpointPodRequest{PodSandboxId: pod, OutputPath: dir, ContainerIds: ids})
		must(t, err)
		want := []string{"pause", "pause", "checkpoint", "checkpoint", "resume", "resume"}
		if got := journal(t, here); !slices.Equal(got, want) {
			t.Errorf("steps %v, want %v", got, want)
		}
		for _, id := range ids {
			s.exec(id, "true")
		}
		s.restore(t, dir, here, configs)
	})
}

// restore restores a pod of two containers from a checkpoint and starts it.
func (s *system) restore(t *testing.T, dir, here string, configs []*criv1.ContainerConfig) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req := &criv1.RestorePodRequest{CheckpointPath: dir, Config: s.podConfig("again"), ContainerConfigs: configs}
	answer, err := s.CRI.RestorePod(ctx, req)
	must(t, err)
	if len(answer.GetRestoredContainers()) != len(configs) {
		t.Fatalf("answer: %v", answer)
	}
	if _, err := os.Stat(filepath.Join(here, "restored")); err == nil {
		t.Error("a process was restored before the start")
	}
	for i, c := range answer.GetRestoredContainers() {
		if c.GetName() != configs[i].GetMetadata().GetName() {
			t.Errorf("container %d is %q", i, c.GetName())
		}
		if st := s.status(c.GetContainerId()); st.GetState() != criv1.ContainerState_CONTAINER_CREATED {
			t.Errorf("restored container is %s", st.GetState())
		}
	}
	for _, c := range answer.GetRestoredContainers() {
		_, err := s.CRI.StartContainer(ctx, &criv1.StartContainerRequest{ContainerId: c.GetContainerId()})
		must(t, err)
		eventually(t, "the root file system has the changes", func() error { return s.try(c.GetContainerId(), "test", "-e", "/mark") })
		log := filepath.Join(req.GetConfig().GetLogDirectory(), c.GetName()+".log")
		eventually(t, "the program sees the old mark", func() error {
			b, err := os.ReadFile(log)
			if err == nil && !strings.Contains(string(b), "restored") {
				err = fmt.Errorf("log is %q", b)
			}
			return err
		})
	}
	b, err := os.ReadFile(filepath.Join(here, "restored"))
	if err != nil || strings.Count(string(b), "state of ") != len(configs) {
		t.Errorf("restored from %q, %v", b, err)
	}
	if _, err := s.CRI.RestorePod(ctx, req); status.Code(err) != codes.AlreadyExists {
		t.Errorf("restored twice: %v", err)
	}
	req.Config, req.ContainerConfigs = s.podConfig("third"), configs[:1]
	if _, err := s.CRI.RestorePod(ctx, req); status.Code(err) != codes.InvalidArgument {
		t.Errorf("restore of half a checkpoint: %v", err)
	}
}

func TestFailedCheckpointLeavesAllRunning(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		s, here := withCheckpoints(t, handler)
		s.pull(busybox)
		pod, config := s.pod("p")
		ids := []string{s.container(pod, config, containerConfig("one", "exec sleep 1000")), s.container(pod, config, containerConfig("two", "exec sleep 1000"))}
		dir := t.TempDir()
		for fault, want := range map[string]codes.Code{"broken": codes.Unknown, "slow": codes.DeadlineExceeded} {
			must(t, os.WriteFile(filepath.Join(here, fault), nil, 0o600))
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			_, err := s.CRI.CheckpointPod(ctx, &criv1.CheckpointPodRequest{PodSandboxId: pod, OutputPath: dir, ContainerIds: ids})
			if ctx.Err() != nil {
				t.Errorf("%s: no answer before the deadline", fault)
			}
			cancel()
			if err == nil || want == codes.DeadlineExceeded && status.Code(err) != want {
				t.Errorf("%s: %v", fault, err)
			}
			if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
				t.Errorf("%s: left %v, %v", fault, left, err)
			}
			for _, id := range ids {
				s.exec(id, "true")
			}
			must(t, os.Remove(filepath.Join(here, fault)))
		}
	})
}

// A sandboxd that dies during a checkpoint leaves paused containers; the next one resumes
// them.
func TestKilledCheckpointLeavesNothingPaused(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		s, here := withCheckpoints(t, handler)
		s.pull(busybox)
		pod, config := s.pod("p")
		id := s.container(pod, config, containerConfig("c", "exec sleep 1000"))
		must(t, os.WriteFile(filepath.Join(here, "slow"), nil, 0o600))
		dir := t.TempDir()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		done := make(chan error, 1)
		go func() {
			_, err := s.CRI.CheckpointPod(ctx, &criv1.CheckpointPodRequest{PodSandboxId: pod, OutputPath: dir, ContainerIds: []string{id}})
			done <- err
		}()
		eventually(t, "the capture begins", func() error {
			if !slices.Contains(journal(t, here), "checkpoint") {
				return errors.New("not yet")
			}
			return nil
		})
		must(t, s.Kill(t.Context(), testenv.Sandboxd))
		must(t, s.Run(testenv.Sandboxd))
		must(t, s.WaitReady(t.Context()))
		if err := <-done; err == nil {
			t.Error("the checkpoint was not cut off")
		}
		eventually(t, "the container runs again", func() error { return s.try(id, "true") })
		eventually(t, "the rest of the checkpoint is removed", func() error {
			left, err := os.ReadDir(dir)
			if err == nil && len(left) > 0 {
				err = fmt.Errorf("left %v", left)
			}
			return err
		})
	})
}

func TestCheckpointOfAContainer(t *testing.T) {
	s, _ := withCheckpoints(t, testenv.HandlerCrisp)
	s.pull(busybox)
	pod, config := s.pod("p")
	id := s.container(pod, config, containerConfig("c", "echo data >/file; exec sleep 1000"))
	eventually(t, "the file is made", func() error { return s.try(id, "test", "-e", "/file") })
	location := filepath.Join(t.TempDir(), "checkpoint.tar")
	req := &criv1.CheckpointContainerRequest{ContainerId: id, Location: location, Timeout: 30}
	_, err := s.CRI.CheckpointContainer(t.Context(), req)
	must(t, err)
	names := tarNames(t, location)
	for _, name := range []string{"checkpoint/pages-1.img", "config.dump", "dump.log", "rootfs-diff.tar", "spec.dump"} {
		if !slices.Contains(names, name) {
			t.Errorf("%s is not in the archive: %v", name, names)
		}
	}
	s.exec(id, "true")
	if _, err := s.CRI.CheckpointContainer(t.Context(), req); status.Code(err) != codes.AlreadyExists {
		t.Errorf("written twice: %v", err)
	}
}

func tarNames(t *testing.T, path string) []string {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	var names []string
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return names
		}
		must(t, err)
		names = append(names, h.Name)
	}
}

// A node without a CRIU that works says so, and pauses nothing.
func TestCheckpointWithoutCRIU(t *testing.T) {
	here := t.TempDir()
	must(t, os.WriteFile(filepath.Join(here, "criu"), []byte("#!/bin/sh\necho 'Error: no vdso' >&2; exit 1\n"), 0o755))
	t.Setenv("PATH", here+":"+os.Getenv("PATH"))
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	pod, config := s.pod("p")
	id := s.container(pod, config, containerConfig("c", "exec sleep 1000"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dir := t.TempDir()
	_, containerErr := s.CRI.CheckpointContainer(ctx, &criv1.CheckpointContainerRequest{ContainerId: id, Location: filepath.Join(dir, "c.tar")})
	_, podErr := s.CRI.CheckpointPod(ctx, &criv1.CheckpointPodRequest{PodSandboxId: pod, OutputPath: dir, ContainerIds: []string{id}})
	for _, err := range []error{containerErr, podErr} {
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(fmt.Sprint(err), "no vdso") {
			t.Errorf("%v, want FailedPrecondition with what criu says", err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
	s.exec(id, "true")
}

// try runs a command in a container and says whether it failed.
func (s *system) try(id string, command ...string) error {
	answer, err := s.CRI.ExecSync(s.t.Context(), &criv1.ExecSyncRequest{ContainerId: id, Cmd: command, Timeout: 20})
	if err == nil && answer.GetExitCode() != 0 {
		err = fmt.Errorf("%q: exit code %d", command, answer.GetExitCode())
	}
	return err
}
