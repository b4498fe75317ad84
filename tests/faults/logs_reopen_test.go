//go:build integration

package faults

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// reopen asks for a container's log to be opened anew; it must not take long.
func (s *system) reopen(id string) error {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 10*time.Second)
	defer cancel()
	_, err := s.CRI.ReopenContainerLog(ctx, &criv1.ReopenContainerLogRequest{ContainerId: id})
	if status.Code(err) == codes.DeadlineExceeded {
		s.t.Errorf("reopening the log of container %s takes too long: %v", id, err)
	}
	return err
}

// waitText waits until a log has a text.
func waitText(t *testing.T, path, text string) {
	t.Helper()
	eventually(t, patience, "the log has "+text, func() error {
		data, err := os.ReadFile(path)
		if err == nil && !strings.Contains(string(data), text) {
			err = fmt.Errorf("%d bytes without %q", len(data), text)
		}
		return err
	})
}

// absent fails the test if there is something at a path.
func absent(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s exists: %v", path, err)
	}
}

// The log of a container that does not run is not reopened, and no file appears where its log
// was moved away; one that is being stopped has its log reopened while the stop goes on.
func TestReopenedIsTheLogOfWhatRuns(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		s := start(t, testenv.Setup{Handler: handler})
		config := s.podConfig("reopened")
		pod := s.pod(config, "")
		refused := func(what, id, path string, want codes.Code) {
			t.Helper()
			if err := s.reopen(id); status.Code(err) != want {
				t.Errorf("%s: %v, want %s", what, err, want)
			}
			absent(t, path)
		}

		created, err := s.create(pod, config, script("created", "sleep 1000"))
		must(t, err)
		refused("created", created, s.status(created).GetLogPath(), codes.FailedPrecondition)

		exited := s.container(pod, config, script("exited", "echo once"))
		s.waitExit(exited, patience)
		path := s.status(exited).GetLogPath()
		must(t, os.Rename(path, path+".1"))
		refused("exited", exited, path, codes.FailedPrecondition)
		must(t, s.removeContainer(exited))
		refused("removed", exited, path, codes.NotFound)

		silent := script("silent", "while true; do echo x; sleep 0.1; done")
		silent.LogPath = ""
		unlogged := s.container(pod, config, silent)
		if err := s.reopen(unlogged); err != nil && status.Code(err) != codes.FailedPrecondition {
			t.Errorf("without a log: %v", err)
		}

		stopping := s.container(pod, config, script("stopping", "trap 'echo asked' TERM; echo ready; n=0; while true; do n=$((n+1)); echo line $n; sleep 0.05; done"))
		path = s.status(stopping).GetLogPath()
		waitText(t, path, "ready")
		stopped := make(chan error, 1)
		go func() { stopped <- s.stopContainer(stopping, 60) }()
		waitText(t, path, "asked")
		must(t, os.Rename(path, path+".1"))
		must(t, s.reopen(stopping))
		waitText(t, path, "line")
		must(t, s.stopContainer(stopping, 0))
		must(t, <-stopped)
		must(t, os.Rename(path, path+".2"))
		refused("stopped", stopping, path, codes.FailedPrecondition)
		for _, id := range []string{unlogged, created} {
			if state := s.status(id).GetState(); id == unlogged && state != criv1.ContainerState_CONTAINER_RUNNING {
				t.Errorf("%s is %s", id, state)
			}
			must(t, s.removeContainer(id))
		}
	})
}

// Whatever stands in a log's place, or if there is no place left, the container goes on, what
// it writes goes on where it went, and once the place is free not a line was lost or doubled.
func TestFailedReopeningLosesNothing(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		s := start(t, testenv.Setup{Handler: handler})
		config := s.podConfig("obstacles")
		pod := s.pod(config, "")
		volume := t.TempDir()
		writes := testenv.Numbered{Name: "writer", Folder: "/volume", Burst: 200, Length: 100, Pause: "0.01"}
		c := script("writer", writes.Script())
		c.LogPath = "folder/writer.log"
		c.Mounts = []*criv1.Mount{{HostPath: volume, ContainerPath: "/volume"}}
		id := s.container(pod, config, c)
		path := s.status(id).GetLogPath()
		outside := filepath.Join(t.TempDir(), "outside")
		must(t, os.WriteFile(outside, []byte("kept"), 0o644))

		var rotated []string
		for name, obstacle := range map[string]func() error{
			"a folder":              func() error { return os.Mkdir(path, 0o755) },
			"a fifo":                func() error { return unix.Mkfifo(path, 0o600) },
			"a link":                func() error { return os.Symlink(outside, path) },
			"a dangling link":       func() error { return os.Symlink(outside+".log", path) },
			"a device":              func() error { return unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))) },
			"no folder":             func() error { return os.Rename(filepath.Dir(path), filepath.Dir(path)+".away") },
			"a link for its folder": func() error { return linkAway(filepath.Dir(path), filepath.Dir(outside)) },
		} {
			old := fmt.Sprintf("%s.%d", s.Path("podlogs", "obstacles", "writer"), len(rotated))
			growing(t, path)
			must(t, os.Rename(path, old))
			must(t, obstacle())
			if err := s.reopen(id); !oneOf(err, codes.InvalidArgument, codes.FailedPrecondition) {
				t.Errorf("%s: %v", name, err)
			}
			growing(t, old)
			if folder := filepath.Dir(path) + ".away"; exists(folder) {
				must(t, os.RemoveAll(filepath.Dir(path)))
				must(t, os.Rename(folder, filepath.Dir(path)))
			}
			must(t, os.RemoveAll(path))
			must(t, s.reopen(id))
			rotated = append(rotated, old)
		}
		growing(t, path)
		must(t, os.WriteFile(filepath.Join(volume, "stop"), nil, 0o644))
		if st := s.waitExit(id, patience); st.GetExitCode() != 0 {
			t.Errorf("exit code %d", st.GetExitCode())
		}
		must(t, writes.Check("stdout", int(number(t, filepath.Join(volume, "writer.lines"))), append(rotated, path)...))
		if text, err := os.ReadFile(outside); err != nil || string(text) != "kept" {
			t.Errorf("a file outside: %q: %v", text, err)
		}
		if entries, err := os.ReadDir(filepath.Dir(outside)); err != nil || len(entries) != 1 {
			t.Errorf("outside: %v: %v", entries, err)
		}
	})
}

// linkAway puts a folder aside and a link in its place.
func linkAway(folder, to string) error {
	return errors.Join(os.Rename(folder, folder+".away"), os.Symlink(to, folder))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// growing waits until a log grows.
func growing(t *testing.T, path string) {
	t.Helper()
	before := int64(-1)
	eventually(t, patience, path+" grows", func() error {
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		if before < 0 {
			before = info.Size()
		}
		if info.Size() <= before {
			return fmt.Errorf("stays at %d bytes", before)
		}
		return nil
	})
}

// A container whose log's folder has gone while sandboxd was dead is not held up when
// sandboxd is back, and is logged again once there is a folder.
func TestLogFolderGoneOverARestart(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		s := start(t, testenv.Setup{Handler: handler})
		config := s.podConfig("homeless")
		pod := s.pod(config, "")
		volume := t.TempDir()
		writes := testenv.Numbered{Name: "writer", Folder: "/volume", Burst: 1000, Length: 100, Pause: "0.01"}
		c := script("writer", writes.Script()+"; echo last words")
		c.Mounts = []*criv1.Mount{{HostPath: volume, ContainerPath: "/volume"}}
		id := s.container(pod, config, c)
		path := s.status(id).GetLogPath()
		growing(t, path)
		must(t, s.Kill(t.Context(), testenv.Sandboxd))
		must(t, os.RemoveAll(filepath.Dir(path)))
		must(t, s.Run(testenv.Sandboxd))
		must(t, s.WaitReady(t.Context()))
		if err := s.reopen(id); !oneOf(err, codes.FailedPrecondition) {
			t.Errorf("reopening without a folder: %v", err)
		}
		absent(t, filepath.Dir(path))
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, s.reopen(id))
		growing(t, path)
		must(t, os.WriteFile(filepath.Join(volume, "stop"), nil, 0o644))
		if st := s.waitExit(id, patience); st.GetExitCode() != 0 {
			t.Errorf("exit code %d: %s", st.GetExitCode(), st.GetReason())
		}
		waitText(t, path, "last words")
	})
}
