package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/pprof"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

const checkTimeout = 2 * time.Second

// Handler returns the routes of the admin listener. With debug set it includes those that
// must be asked for.
func Handler(tel *telemetry.Telemetry, debug bool, checks ...Check) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(tel.Registry, promhttp.HandlerOpts{EnableOpenMetrics: true}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "ok\n")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		readyz(w, r, checks)
	})
	if !debug {
		return mux
	}
	mux.HandleFunc("GET /loglevel", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, strings.ToLower(tel.Level.Level().String()))
	})
	mux.HandleFunc("PUT /loglevel", func(w http.ResponseWriter, r *http.Request) { putLevel(w, r, tel) })
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return mux
}

func putLevel(w http.ResponseWriter, r *http.Request, tel *telemetry.Telemetry) {
	text, err := io.ReadAll(io.LimitReader(r.Body, 64))
	if err == nil {
		err = tel.SetLevel(strings.TrimSpace(string(text)))
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// failure is one element of the list that readyz answers with.
type failure struct {
	Name  string `json:"name"`
	Error string `json:"error"`
}

func readyz(w http.ResponseWriter, r *http.Request, checks []Check) {
	failing := runChecks(r.Context(), checks)
	w.Header().Set("Content-Type", "application/json")
	if len(failing) > 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	// The only error here is a client that went away.
	_ = json.NewEncoder(w).Encode(struct {
		Ready   bool      `json:"ready"`
		Failing []failure `json:"failing"`
	}{len(failing) == 0, failing})
}

// runChecks runs all checks at once and returns those that fail, in the given order.
func runChecks(ctx context.Context, checks []Check) []failure {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	errs := make([]error, len(checks))
	var wg sync.WaitGroup
	for i, c := range checks {
		wg.Go(func() { errs[i] = c.Ready(ctx) })
	}
	wg.Wait()
	failing := []failure{}
	for i, err := range errs {
		if err != nil {
			failing = append(failing, failure{checks[i].Name, err.Error()})
		}
	}
	return failing
}
