package cleanup

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/bundle"
)

// A container of which nothing is left is no error, and has an end all the same.
func TestContainerWithoutBundle(t *testing.T) {
	t.Parallel()
	id := strings.Repeat("a", 64)
	b, err := bundle.Open(t.TempDir(), id)
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	c := New(nil, time.Second, "this boot") // no delete command: it is of another boot
	exit := c.Container(t.Context(), slog.New(slog.NewTextHandler(&log, nil)), b, bundle.Meta{BootID: "another"}, id)
	if exit.Code != pod.ExitCodeUnknown || !exit.Unknown || exit.At.IsZero() {
		t.Errorf("exit %+v", exit)
	}
	if strings.Contains(log.String(), "level=ERROR") {
		t.Error(log.String())
	}
}
