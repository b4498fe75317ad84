//go:build integration

package faults

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// maxLine is the content of the longest record by default.
const maxLine = 16 << 10

// record is one line of a log.
type record struct{ stream, tag, content string }

// records reads a log, each line of which must be a whole record.
func records(t *testing.T, path string) []record {
	t.Helper()
	text, err := os.ReadFile(path)
	must(t, err)
	var all []record
	for line := range bytes.Lines(text) {
		fields := strings.SplitN(strings.TrimSuffix(string(line), "\n"), " ", 4)
		if len(fields) != 4 || !bytes.HasSuffix(line, []byte("\n")) {
			t.Fatalf("%s: record %d is %.80q", path, len(all), line)
		}
		if _, err := time.Parse(time.RFC3339Nano, fields[0]); err != nil {
			t.Fatalf("%s: record %d: %v", path, len(all), err)
		}
		if fields[1] != "stdout" && fields[1] != "stderr" || fields[2] != "F" && fields[2] != "P" || len(fields[3]) > maxLine {
			t.Fatalf("%s: record %d is %.80q of %d bytes", path, len(all), line, len(fields[3]))
		}
		all = append(all, record{fields[1], fields[2], fields[3]})
	}
	return all
}

// joined is what a stream's records say that was written.
func joined(all []record, stream string) string {
	var text strings.Builder
	for _, r := range all {
		if r.stream != stream {
			continue
		}
		text.WriteString(r.content)
		if r.tag == "F" {
			text.WriteByte('\n')
		}
	}
	return text.String()
}

// The records of a log, joined, are the bytes that were written: lines about and far above the
// limit, nothing but bytes, what looks like a record, an end without a newline, and pieces of
// both streams in turn.
func TestLogHoldsTheBytesWritten(t *testing.T) {
	var binary strings.Builder
	for b := range 256 {
		binary.WriteByte(byte(b))
	}
	full := strings.Repeat("f", maxLine)
	parts := []string{
		full[1:] + "\n", full + "\n", full + "x\n", full + full + "\n", "\n", "\n\n", "\r\n", "a\rb\n", "\x00\x00\n", "\xff\xfe\xc3\n", binary.String() + "\n",
		"2026-01-01T00:00:00.000000001Z stdout F forged\n", strings.Repeat("long", 5<<20/4) + "\n",
	}
	files := map[string]string{"stdout": strings.Join(parts, "") + "no end", "stderr": strings.Join(parts, "x\n") + full}
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		s := start(t, testenv.Setup{Handler: handler})
		config := s.podConfig("written")
		pod := s.pod(config, "")
		folder := t.TempDir()
		for name, content := range files {
			must(t, os.WriteFile(filepath.Join(folder, name), []byte(content), 0o644))
		}
		c := script("written", "cat /files/stderr >&2 & cat /files/stdout; wait")
		c.Mounts = []*criv1.Mount{{HostPath: folder, ContainerPath: "/files", Readonly: true}}
		id := s.container(pod, config, c)
		s.waitExit(id, patience)
		all := records(t, s.status(id).GetLogPath())
		last := map[string]record{}
		exact := 0
		for _, r := range all {
			last[r.stream] = r
			if r.stream == "stdout" && r.tag == "F" && r.content == full {
				exact++
			}
		}
		for stream, want := range files {
			if got := joined(all, stream); got != want {
				t.Errorf("%s: %d bytes that are not the %d written", stream, len(got), len(want))
			}
			if last[stream].tag != "P" {
				t.Errorf("%s ends with %.20q, tagged %s", stream, last[stream].content, last[stream].tag)
			}
		}
		// A line of exactly the limit, and the second half of one of twice of it.
		if exact != 2 {
			t.Errorf("%d whole records of the limit, want 2", exact)
		}

		mixed := script("mixed", `n=0; while [ $n -lt 300 ]; do n=$((n+1)); printf "out$n;"; printf "err$n;" >&2; [ $((n%7)) != 0 ] || { echo; echo >&2; }; done`)
		id = s.container(pod, config, mixed)
		s.waitExit(id, patience)
		all = records(t, s.status(id).GetLogPath())
		for stream, word := range map[string]string{"stdout": "out", "stderr": "err"} {
			var want strings.Builder
			for n := 1; n <= 300; n++ {
				fmt.Fprintf(&want, "%s%d;", word, n)
				if n%7 == 0 {
					want.WriteByte('\n')
				}
			}
			if got := joined(all, stream); got != want.String() {
				t.Errorf("%s in pieces: %q", stream, got)
			}
		}
	})
}

// Output without a newline takes no memory of whoever logs it.
func TestEndlessLineTakesNoMemory(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		s := start(t, testenv.Setup{Handler: handler})
		config := s.podConfig("endless")
		pod := s.pod(config, "")
		size := scaled(t, 64) << 20
		writer := s.Pid(testenv.Sandboxd)
		if handler == testenv.HandlerCrisp {
			writer = s.shimOf(pod)
		}
		before := peakMemory(t, writer)
		id := s.container(pod, config, script("endless", fmt.Sprintf("head -c %d /dev/zero", size)))
		s.waitExit(id, patience)
		if grown := peakMemory(t, writer) - before; grown > 24<<20 {
			t.Errorf("the peak of memory grew by %d MiB with %d MiB of output", grown>>20, size>>20)
		}
		got := 0
		for _, r := range records(t, s.status(id).GetLogPath()) {
			got += len(r.content)
			if r.tag != "P" {
				t.Fatalf("a record of %d bytes is tagged %s", len(r.content), r.tag)
			}
		}
		if got != size {
			t.Errorf("%d bytes in the log, want %d", got, size)
		}
	})
}

// peakMemory is the most resident memory that a process had, in bytes.
func peakMemory(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "VmHWM:" {
			n, err := strconv.Atoi(fields[1])
			must(t, err)
			return n << 10
		}
	}
	t.Fatalf("process %d has no memory", pid)
	return 0
}

// tmpfs mounts a file system of that size at a folder of its own for the test.
func tmpfs(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir()
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, options))
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// A container whose log has no room is not held up; what cannot be logged is left out by whole
// records, and the log goes on when there is room.
func TestFullDiskForTheLog(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		disk := tmpfs(t, "size=2m")
		s := start(t, testenv.Setup{Handler: handler})
		config := s.podConfig("full")
		config.LogDirectory = disk
		pod := s.pod(config, "")
		ballast := filepath.Join(disk, "ballast")
		must(t, os.WriteFile(ballast, make([]byte, 1<<20), 0o644))
		volume := t.TempDir()
		writes := testenv.Numbered{Name: "writer", Folder: "/volume", Burst: 100, Length: 1000, Pause: "0.01"}
		c := script("writer", writes.Script())
		c.Mounts = []*criv1.Mount{{HostPath: volume, ContainerPath: "/volume"}}
		id := s.container(pod, config, c)
		path := s.status(id).GetLogPath()
		eventually(t, patience, "the disk is full", func() error {
			var st unix.Statfs_t
			if err := unix.Statfs(disk, &st); err != nil {
				return err
			}
			if st.Bavail > 0 {
				return fmt.Errorf("%d blocks left", st.Bavail)
			}
			return nil
		})
		if out, code, err := s.exec(id, "echo", "alive"); err != nil || code != 0 {
			t.Errorf("exec: %q, %d: %v", out, code, err)
		}
		// Some more bursts find no room.
		time.Sleep(300 * time.Millisecond)
		must(t, os.Remove(ballast))
		growing(t, path)
		must(t, os.WriteFile(filepath.Join(volume, "stop"), nil, 0o644))
		if st := s.waitExit(id, patience); st.GetExitCode() != 0 {
			t.Errorf("exit code %d", st.GetExitCode())
		}
		if slowest := number(t, filepath.Join(volume, "writer.slowest")); slowest > 5 {
			t.Errorf("100 kB took %.1f s", slowest)
		}
		next, gaps, lines := 0, 0, strings.Split(joined(records(t, path), "stdout"), "\n")
		for _, line := range lines[:len(lines)-1] {
			n, err := strconv.Atoi(line[:min(9, len(line))])
			if err != nil || len(line) != 999 && n == next {
				t.Fatalf("line after %d is %.40q of %d bytes", next, line, len(line))
			}
			if n < next {
				t.Fatalf("line %d after %d", n, next-1)
			}
			if n > next {
				gaps++
			}
			next = n + 1
		}
		if gaps == 0 {
			t.Error("nothing was left out: the disk was not full")
		}
	})
}

// Something else in place of a pod's folder of logs is told when the pod is made, and, if it comes
// later, when a container is; nothing is left then.
func TestLogFolderOfAnotherKind(t *testing.T) {
	s := start(t, testenv.Setup{})
	config := s.podConfig("late")
	pod := s.pod(config, "")
	must(t, os.MkdirAll(filepath.Dir(config.GetLogDirectory()), 0o755))
	must(t, os.WriteFile(config.GetLogDirectory(), nil, 0o644))
	again := s.podConfig("late")
	again.Metadata.Attempt++
	_, err := s.try(again, "", patience)
	_, createErr := s.create(pod, config, script("main", "true"))
	for _, err := range []error{err, createErr} {
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(fmt.Sprint(err), config.GetLogDirectory()) {
			t.Errorf("a file in place of the folder: %v", err)
		}
	}
	if same, err := s.try(config, "", patience); err != nil || same != pod {
		t.Errorf("the same request again: %q, %v", same, err)
	}
	must(t, os.Remove(config.GetLogDirectory()))
	s.container(pod, config, script("main", "true"))
	if pods := s.pods(); len(pods) != 1 {
		t.Errorf("pods %v", pods)
	}
}

// Paths of logs that lead out of the pod's folder are refused, at the creation if the path
// says so, else at the start, and nothing outside is touched.
func TestLogsStayInTheirFolder(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		s := start(t, testenv.Setup{Handler: handler})
		outside := t.TempDir()
		kept := filepath.Join(outside, "kept")
		must(t, os.WriteFile(kept, []byte("kept"), 0o644))
		for _, dir := range []string{"relative", "/logs/../other", "relative/../x", "/a\nb"} {
			config := s.podConfig("refused")
			config.LogDirectory = dir
			if _, err := s.try(config, "", 20*time.Second); status.Code(err) != codes.InvalidArgument {
				t.Errorf("log directory %q: %v", dir, err)
			}
		}

		// The folder itself may be a link: that is the administrator's.
		config := s.podConfig("inside")
		real := s.Path("podlogs-real")
		must(t, os.MkdirAll(real, 0o755))
		must(t, os.MkdirAll(filepath.Dir(config.GetLogDirectory()), 0o755))
		must(t, os.Symlink(real, config.GetLogDirectory()))
		pod := s.pod(config, "")
		for _, path := range []string{"../../x.log", "/x.log", "a/../../x", "a/../x", "..", ".", "folder/", "a\nb.log", strings.Repeat("x", 300)} {
			c := script("refused", "true")
			c.LogPath = path
			if _, err := s.create(pod, config, c); status.Code(err) != codes.InvalidArgument {
				t.Errorf("log path %.40q: %v", path, err)
			}
		}
		for name, obstacle := range map[string]func(path string) error{
			"up": func(path string) error { return os.Symlink(outside, path) },
			"link": func(path string) error {
				return makeThen(path, func(log string) error { return os.Symlink(kept, log) })
			},
			"new": func(path string) error {
				return makeThen(path, func(log string) error { return os.Symlink(kept+".log", log) })
			},
			"fifo": func(path string) error {
				return makeThen(path, func(log string) error { return unix.Mkfifo(log, 0o600) })
			},
			"device": func(path string) error {
				return makeThen(path, func(log string) error { return unix.Mknod(log, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))) })
			},
			"folder": func(path string) error { return os.MkdirAll(filepath.Join(path, "log"), 0o755) },
		} {
			must(t, obstacle(filepath.Join(real, name)))
			c := script(name, "echo written")
			c.LogPath = name + "/log"
			id, err := s.create(pod, config, c)
			must(t, err)
			if err := s.startContainer(id); status.Code(err) != codes.InvalidArgument {
				t.Errorf("%s: %v", name, err)
			}
			if st := s.status(id); st.GetState() != criv1.ContainerState_CONTAINER_EXITED || st.GetReason() != "StartError" {
				t.Errorf("%s: %s, %s", name, st.GetState(), st.GetReason())
			}
			must(t, s.removeContainer(id))
		}
		if entries, err := os.ReadDir(outside); err != nil || len(entries) != 1 {
			t.Errorf("outside: %v: %v", entries, err)
		}
		if text, err := os.ReadFile(kept); err != nil || string(text) != "kept" {
			t.Errorf("outside: %q: %v", text, err)
		}
		s.shareLog(pod, config, real)
	})
}

// makeThen makes a folder and something for the log in it.
func makeThen(path string, obstacle func(log string) error) error {
	if err := os.Mkdir(path, 0o755); err != nil {
		return err
	}
	return obstacle(filepath.Join(path, "log"))
}

// shareLog has two containers write into one log that exists already, whose records stay
// whole; removing one leaves the log and its neighbours.
func (s *system) shareLog(pod string, config *criv1.PodSandboxConfig, folder string) {
	t := s.t
	t.Helper()
	const before = "2026-01-01T00:00:00.000000001Z stdout F 000000000 of before\n"
	path, neighbour := filepath.Join(folder, "shared.log"), filepath.Join(folder, "neighbour.log")
	must(t, os.WriteFile(path, []byte(before), 0o600))
	must(t, os.WriteFile(neighbour, []byte("kept"), 0o600))
	volume := t.TempDir()
	writes := map[string]testenv.Numbered{}
	var ids []string
	for stream, redirect := range map[string]string{"stdout": "", "stderr": " >&2"} {
		writes[stream] = testenv.Numbered{Name: stream, Folder: "/volume", Burst: 300, Length: 150, Pause: "0.01"}
		c := script(stream, "{ "+writes[stream].Script()+"\n}"+redirect)
		c.LogPath = "shared.log"
		c.Mounts = []*criv1.Mount{{HostPath: volume, ContainerPath: "/volume"}}
		ids = append(ids, s.container(pod, config, c))
	}
	growing(t, path)
	must(t, os.WriteFile(filepath.Join(volume, "stop"), nil, 0o644))
	for _, id := range ids {
		s.waitExit(id, patience)
	}
	must(t, s.removeContainer(ids[0]))
	text, err := os.ReadFile(path)
	must(t, err)
	if !bytes.HasPrefix(text, []byte(before)) {
		t.Errorf("what was in the log was not kept: %.80q", text)
	}
	must(t, os.WriteFile(path, bytes.TrimPrefix(text, []byte(before)), 0o600))
	for stream, writer := range writes {
		must(t, writer.Check(stream, int(number(t, filepath.Join(volume, stream+".lines"))), path))
	}
	if kept, err := os.ReadFile(neighbour); err != nil || string(kept) != "kept" {
		t.Errorf("neighbour: %q: %v", kept, err)
	}
	must(t, s.removeContainer(ids[1]))
	if !exists(path) {
		t.Error("the log went with its container")
	}
}
