package admin_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/crisp-cri/crisp/services/internal/admin"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

func newTelemetry(t *testing.T) *telemetry.Telemetry {
	t.Helper()
	tel, err := telemetry.New(t.Context(), telemetry.Config{Service: "svc"}, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	return tel
}

func call(h http.Handler, method, path, body string) (int, string) {
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, httptest.NewRequest(method, path, strings.NewReader(body)))
	return rec.Code, rec.Body.String()
}

func TestReadyz(t *testing.T) {
	t.Parallel()
	broken := errors.New("bus is away")
	var failing bool
	h := admin.Handler(newTelemetry(t), true,
		admin.Check{Name: "store", Ready: func(context.Context) error { return nil }},
		admin.Check{Name: "bus", Ready: func(context.Context) error {
			if failing {
				return broken
			}
			return nil
		}})
	if code, body := call(h, "GET", "/readyz", ""); code != http.StatusOK || body != "{\"ready\":true,\"failing\":[]}\n" {
		t.Errorf("ready: got %d %s", code, body)
	}
	failing = true
	code, body := call(h, "GET", "/readyz", "")
	var got struct {
		Ready   bool
		Failing []struct{ Name, Error string }
	}
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	if code != http.StatusServiceUnavailable || got.Ready || len(got.Failing) != 1 || got.Failing[0].Name != "bus" ||
		got.Failing[0].Error != "bus is away" {
		t.Errorf("not ready: got %d %s", code, body)
	}
	if code, _ := call(h, "GET", "/healthz", ""); code != http.StatusOK {
		t.Errorf("healthz: got %d although the process lives", code)
	}
}

func TestRoutes(t *testing.T) {
	t.Parallel()
	tel := newTelemetry(t)
	local, plain := admin.Handler(tel, true), admin.Handler(tel, false)
	if code, body := call(local, "GET", "/metrics", ""); code != http.StatusOK || !strings.Contains(body, "crisp_build_info{") {
		t.Errorf("metrics: got %d %s", code, body)
	}
	if code, _ := call(local, "PUT", "/loglevel", "debug\n"); code != http.StatusNoContent {
		t.Errorf("loglevel: got %d", code)
	}
	if _, body := call(local, "GET", "/loglevel", ""); body != "debug\n" {
		t.Errorf("loglevel is %q", body)
	}
	if code, _ := call(local, "PUT", "/loglevel", "loud"); code != http.StatusBadRequest {
		t.Errorf("bad loglevel: got %d", code)
	}
	if code, _ := call(local, "GET", "/debug/pprof/goroutine?debug=1", ""); code != http.StatusOK {
		t.Errorf("pprof: got %d", code)
	}
	for _, path := range []string{"/debug/pprof/", "/loglevel"} {
		if code, _ := call(plain, "GET", path, ""); code != http.StatusNotFound {
			t.Errorf("%s without being asked for: got %d", path, code)
		}
	}
}

func TestPartServesAndStops(t *testing.T) {
	t.Parallel()
	// The port is taken from a listener that is closed again: the part prints its own
	// address only to the log.
	probe := httptest.NewServer(http.NotFoundHandler())
	addr := probe.Listener.Addr().String()
	probe.Close()
	ctx, cancel := context.WithCancel(t.Context())
	ready, done := make(chan struct{}), make(chan error, 1)
	part := admin.Part(admin.Config{Listen: addr}, newTelemetry(t))
	go func() { done <- part.Run(ctx, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	resp, err := http.Get("http://" + addr + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil || string(body) != "ok\n" {
		t.Errorf("got %q, %v", body, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestConfigValidate(t *testing.T) {
	t.Parallel()
	for listen, ok := range map[string]bool{"": true, "127.0.0.1:1": true, ":9670": true, "9670": false} {
		if err := (admin.Config{Listen: listen}).Validate(); (err == nil) != ok {
			t.Errorf("%q: got %v", listen, err)
		}
	}
}
