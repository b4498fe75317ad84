package reload_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/crisp-cri/crisp/services/internal/reload"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type section struct {
	Level string            `toml:"level"`
	Map   map[string]string `toml:"map"`
}

type cfg struct {
	Name string  `toml:"name"`
	Log  section `toml:"log"`
}

func TestChanges(t *testing.T) {
	t.Parallel()
	a := cfg{Name: "x", Log: section{Level: "info", Map: map[string]string{"gone": "1", "same": "1"}}}
	b := cfg{Name: "y", Log: section{Level: "info", Map: map[string]string{"new": "1", "same": "1"}}}
	got, err := reload.Changes(a, b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"log.map.gone", "log.map.new", "name"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestReload(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close()
	t.Setenv("NOTIFY_SOCKET", socket)
	said := func() string {
		t.Helper()
		buf := make([]byte, 200)
		if err := manager.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		n, err := manager.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		return string(buf[:n])
	}

	var out testkit.Buffer
	tel, err := telemetry.New(t.Context(), telemetry.Config{Service: "test", Log: telemetry.DefaultLogConfig(), Trace: telemetry.DefaultTraceConfig()}, &out)
	if err != nil {
		t.Fatal(err)
	}
	signals := make(chan os.Signal, 1)
	next, loadErr, applyErr := cfg{}, error(nil), error(nil)
	var applied []cfg
	part := reload.Part(cfg{Name: "start"}, reload.Source[cfg]{
		Signals: signals, Load: func() (cfg, error) { return next, loadErr },
	}, reload.Target[cfg]{
		Live: []string{"log"},
		Apply: func(_ context.Context, c cfg) error {
			if applyErr == nil {
				applied = append(applied, c)
			}
			return applyErr
		},
	}, tel)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- part.Run(ctx, func() {}) }()

	// The manager hears of the end of each reload, after which the variables may be read.
	round := func() {
		t.Helper()
		signals <- syscall.SIGHUP
		if got := said(); !strings.HasPrefix(got, "RELOADING=1\nMONOTONIC_USEC=") {
			t.Errorf("the manager was told %q", got)
		}
		if got := said(); got != "READY=1" {
			t.Errorf("the manager was told %q", got)
		}
	}
	next = cfg{Name: "other", Log: section{Level: "debug"}}
	round()
	if len(applied) != 1 || applied[0].Log.Level != "debug" {
		t.Errorf("applied %+v", applied)
	}
	loadErr = errors.New("line 3: broken")
	round()
	loadErr, applyErr = nil, errors.New("cannot do that")
	round()
	applyErr = nil
	round()
	if len(applied) != 2 {
		t.Errorf("applied %+v", applied)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	text := out.String()
	for want, times := range map[string]int{
		"line 3: broken": 1, "cannot do that": 1, "the old one stays in force": 2, "wait for the next start": 2, `[log.level]`: 1, "keys=[name]": 2,
	} {
		if n := strings.Count(strings.ReplaceAll(text, `"`, ""), want); n != times {
			t.Errorf("%q %d times in the log, want %d:\n%s", want, n, times, text)
		}
	}
	for name, want := range map[string]float64{"applied": 2, "refused": 2} {
		if got := counted(t, tel, name); got != want {
			t.Errorf("%s: %v reloads, want %v", name, got, want)
		}
	}
}

func counted(t *testing.T, tel *telemetry.Telemetry, result string) float64 {
	t.Helper()
	families, err := tel.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "crisp_config_reloads_total" && fmt.Sprint(m.GetLabel()[0].GetValue()) == result {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}
