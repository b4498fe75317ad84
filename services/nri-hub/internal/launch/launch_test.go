package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// hall is a Server that says who comes and goes.
type hall struct{ came, went chan string }

func (h hall) ServeLaunched(ctx context.Context, c net.Conn, p Plugin) error {
	defer c.Close()
	h.came <- p.Index + "-" + p.Name
	<-ctx.Done()
	h.went <- p.Index + "-" + p.Name
	return nil
}

func (hall) ServeWasm(context.Context, Plugin) error { return nil }

func (h hall) expect(t *testing.T, who <-chan string, want string) {
	t.Helper()
	select {
	case got := <-who:
		if got != want {
			t.Errorf("it is %s, want %s", got, want)
		}
	case <-time.After(testkit.Patience):
		t.Fatalf("%s is missing", want)
	}
}

func put(t *testing.T, folder, name string, at time.Time) {
	t.Helper()
	write(t, folder, name, "exec sleep 1000", at)
}

func write(t *testing.T, folder, name, script string, at time.Time) {
	t.Helper()
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	temporary := filepath.Join(filepath.Dir(folder), "new")
	if err := os.WriteFile(temporary, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(temporary, at, at); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(temporary, filepath.Join(folder, name)); err != nil {
		t.Fatal(err)
	}
}

func run(t *testing.T, folder string) hall {
	t.Helper()
	return runWith(t, folder, 10*time.Millisecond, testkit.Patience)
}

func runWith(t *testing.T, folder string, pause, stop time.Duration) hall {
	t.Helper()
	h := hall{came: make(chan string, 10), went: make(chan string, 10)}
	l := New(Config{
		Folder: folder, ConfigFolder: folder, MinBackoff: pause, MaxBackoff: time.Second, StopTimeout: stop,
	}, slog.New(slog.DiscardHandler), h)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return h
}

// A replaced file is another plugin, even if it is as large and as old as the one before.
func TestReplacedFileIsRestarted(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "plugins")
	at := time.Now().Add(-time.Hour)
	put(t, folder, "10-p", at)
	h := run(t, folder)
	h.expect(t, h.came, "10-p")
	put(t, folder, "10-p", at)
	h.expect(t, h.went, "10-p")
	h.expect(t, h.came, "10-p")
}

// The folder may come late, go, come again, and be replaced by another in one step; what is in
// it then counts, also what is put there later.
func TestFolderThatIsReplaced(t *testing.T) {
	t.Parallel()
	top := t.TempDir()
	folder := filepath.Join(top, "plugins")
	h := run(t, folder)
	put(t, folder, "10-late", time.Now())
	h.expect(t, h.came, "10-late")

	other := filepath.Join(top, "other")
	put(t, other, "20-other", time.Now())
	if err := os.Rename(folder, filepath.Join(top, "old")); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(other, folder); err != nil {
		t.Fatal(err)
	}
	h.expect(t, h.went, "10-late")
	h.expect(t, h.came, "20-other")
	put(t, folder, "30-later", time.Now())
	h.expect(t, h.came, "30-later")

	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	<-h.went
	<-h.went
	put(t, folder, "40-again", time.Now())
	h.expect(t, h.came, "40-again")
	put(t, folder, "50-watched", time.Now())
	h.expect(t, h.came, "50-watched")
}

// A plugin that ends at once is started again after pauses that grow.
func TestPausesGrow(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "plugins")
	write(t, folder, "10-ends", "date +%s%N >> "+filepath.Join(folder, "..", "starts"), time.Now())
	begin := time.Now()
	runWith(t, folder, 200*time.Millisecond, testkit.Patience)
	const starts, least = 4, (200 + 400 + 800) * time.Millisecond
	testkit.Eventually(t, testkit.Patience, func() error {
		text, err := os.ReadFile(filepath.Join(folder, "..", "starts"))
		if n := bytes.Count(text, []byte("\n")); err == nil && n < starts {
			err = fmt.Errorf("started %d times", n)
		}
		return err
	})
	if took := time.Since(begin); took < least {
		t.Errorf("started %d times within %v, want pauses of %v", starts, took, least)
	}
}

// A process that does not heed SIGTERM is killed; a configuration that cannot be read is
// nobody else's trouble.
func TestPluginsThatMisbehave(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "plugins")
	put(t, folder, "10-good", time.Now())
	put(t, folder, "30-unreadable", time.Now())
	if err := os.Mkdir(filepath.Join(folder, "30-unreadable.conf"), 0o755); err != nil {
		t.Fatal(err)
	}
	h := runWith(t, folder, 10*time.Millisecond, 500*time.Millisecond)
	h.expect(t, h.came, "10-good")
	write(t, folder, "20-deaf", fmt.Sprintf("trap 'touch %[1]s/told' TERM; echo $$ > %[1]s/deaf; while :; do sleep 0.1; done", filepath.Dir(folder)), time.Now())
	h.expect(t, h.came, "20-deaf")
	testkit.Eventually(t, testkit.Patience, func() error {
		_, err := os.Stat(filepath.Join(folder, "..", "deaf"))
		return err
	})
	if err := os.Remove(filepath.Join(folder, "20-deaf")); err != nil {
		t.Fatal(err)
	}
	h.expect(t, h.went, "20-deaf")
	testkit.Eventually(t, testkit.Patience, func() error {
		pid, err := os.ReadFile(filepath.Join(filepath.Dir(folder), "deaf"))
		if err != nil {
			return err
		}
		if _, err := os.Stat("/proc/" + strings.TrimSpace(string(pid))); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("its process is there: %w", err)
		}
		return nil
	})
	if _, err := os.Stat(filepath.Join(filepath.Dir(folder), "told")); err != nil {
		t.Errorf("it was not asked to end first: %v", err)
	}
	put(t, folder, "40-next", time.Now())
	h.expect(t, h.came, "40-next")
}
