//go:build integration

package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/leak"
	"github.com/crisp-cri/crisp/tests/testenv"
)

const (
	defaultRounds = 20
	defaultSeed   = 20260
	// roundLimit is the longest that a round may take to come to rest.
	roundLimit = 2 * time.Minute
)

func TestMain(m *testing.M) {
	os.Exit(testenv.Main(context.Background(), m))
}

// The runtime handlers of the rounds: the stock shim, and our own with either controller.
const (
	handlerStock    = "stock"
	handlerCrisp    = "own"
	handlerCrispAPI = "own-sandbox-api"
)

// configure adds the handlers.
func configure(p testenv.Process, settings testenv.Settings) {
	if p != testenv.Sandboxd {
		return
	}
	for name, kind := range map[string][3]string{
		handlerStock:    {"io.containerd.runc.v2", "containerd-shim-runc-v2", "podsandbox"},
		handlerCrisp:    {"io.containerd.crisp.v1", "containerd-shim-crisp-v1", "podsandbox"},
		handlerCrispAPI: {"io.containerd.crisp.v1", "containerd-shim-crisp-v1", "shim"},
	} {
		binary, err := testenv.Binary(kind[1])
		if err != nil {
			panic(err) // built together with the processes
		}
		key := "runtime.handlers." + name
		settings.Set(key+".runtime_type", kind[0])
		settings.Set(key+".shim_path", binary)
		settings.Set(key+".sandboxer", kind[2])
		for _, same := range []string{".binary_name", ".runtime_root"} {
			settings.Set(key+same, settings.Get("runtime.handlers.runc"+same))
		}
	}
}

// setting reads a number from the environment.
func setting(t *testing.T, name string, otherwise int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

func start(t *testing.T) *testenv.System {
	t.Helper()
	parts, err := fixture.FindParts(t.Context(), fixture.PartsConfig{})
	if err != nil {
		t.Fatal(err)
	}
	images, err := fixture.Conformance(parts)
	if err != nil {
		t.Fatal(err)
	}
	s := testenv.Start(t, testenv.Setup{Images: images, Configure: configure})
	_, err = s.Images.PullImage(t.Context(), &criv1.PullImageRequest{Image: &criv1.ImageSpec{Image: fixture.BusyboxImage}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Whatever dies and whenever, the system comes to rest in order.
func TestRandomKills(t *testing.T) {
	s := start(t)
	rounds, seed, first := setting(t, "CRISP_CHAOS_ROUNDS", defaultRounds), setting(t, "CRISP_CHAOS_SEED", defaultSeed), setting(t, "CRISP_CHAOS_FIRST", 0)
	events := &stream{system: s}
	for n := first; n < first+rounds; n++ {
		ok := t.Run(fmt.Sprintf("round=%d", n), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), roundLimit)
			defer cancel()
			r := &round{t: t, s: s, number: n, seed: uint64(seed), events: events}
			r.run(ctx)
		})
		if !ok {
			break // What the next rounds would find is what this one left.
		}
	}
}

// checkState runs the program's own inspection.
func checkState(ctx context.Context, s *testenv.System) error {
	program, err := testenv.Binary(string(testenv.Sandboxd))
	if err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, program, "check-state", "--config", s.ConfigFile(testenv.Sandboxd), "--wait", "15s").CombinedOutput()
	if err != nil {
		return fmt.Errorf("check-state: %w:\n%s", err, out)
	}
	return nil
}

// checkProcesses asks all four processes whether they are ready.
func checkProcesses(ctx context.Context) error {
	for name, port := range map[testenv.Process]int{testenv.Gateway: 9670, testenv.Sandboxd: 9671, testenv.NRIHub: 9672, testenv.EventBus: 9673} {
		err := eventually(ctx, time.Minute, func() error {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/readyz", port), nil)
			if err != nil {
				return err
			}
			answer, err := http.DefaultClient.Do(req)
			if err != nil {
				return err
			}
			text, err := io.ReadAll(answer.Body)
			err = errors.Join(err, answer.Body.Close())
			if answer.StatusCode != http.StatusOK {
				return fmt.Errorf("status %d: %s", answer.StatusCode, strings.TrimSpace(string(text)))
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("%s is not ready: %w", name, err)
		}
	}
	return nil
}

func checkLeaks(ctx context.Context, before leak.Snapshot, scope leak.Scope) error {
	leaked, err := leak.Settle(ctx, before, scope, time.Minute)
	if err != nil {
		return err
	}
	if len(leaked) > 0 {
		return errors.New(leak.Report(leaked))
	}
	return nil
}

// eventually polls until check succeeds or the time is up.
func eventually(ctx context.Context, limit time.Duration, check func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := check()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		if !pause(ctx, 50*time.Millisecond) {
			return errors.Join(err, ctx.Err())
		}
	}
}

// pause waits; false means that ctx ended first.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
