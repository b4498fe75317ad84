package app_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/internal/cli"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/app"
)

func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out, diag bytes.Buffer
	err := cli.Main(t.Context(), app.Program(), args, &out, &diag)
	return out.String(), err
}

func TestCommands(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	h.mustStart("10", "a", &recorder{onCreate: func(_ context.Context, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		if c.GetName() == "bad" {
			return nil, nil, errNo
		}
		return env("NEW", "value"), nil, nil
	}})
	g.await(t, "10-a")
	if _, err := g.create(t.Context(), "c1"); err != nil {
		t.Fatal(err)
	}
	socket := h.cfg.Server.Socket.Path
	manifest := filepath.Join(h.cfg.RunFolder, "pod.yaml")
	text := "kind: Pod\nmetadata: {name: web}\nspec: {containers: [{name: good}, {name: bad}]}\n"
	if err := os.WriteFile(manifest, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		args  string
		out   []string
		error string
	}{
		{args: "plugins --socket S", out: []string{"10-a", "active", "external"}},
		{args: "plugins --socket S --json", out: []string{`"name"`, `"state"`}},
		{args: "plugins inspect a --socket S", out: []string{"failure policy", "CreateContainer", " answered"}},
		{args: "plugins inspect 10-a --json --socket S", out: []string{`"mean_latency_nano"`}},
		{args: "plugins inspect nobody --socket S", error: "nobody"},
		{args: "plugins drop --socket S", error: "inspect NAME"},
		{args: "plugins --socket /nowhere/x.sock", error: "no hub is running"},
		{args: "dry-run -f M --container good --socket S", out: []string{"container good", "10-a", "env[NEW]", "value"}},
		{args: "dry-run -f M --socket S", out: []string{"container bad", "would fail"}, error: "would not be created"},
		{args: "dry-run -f M --container other --socket S", error: "other"},
		{args: "dry-run --socket S", error: "-f FILE"},
	}
	for _, tt := range tests {
		args := strings.Fields(tt.args)
		for i, a := range args {
			switch a {
			case "S":
				args[i] = socket
			case "M":
				args[i] = manifest
			}
		}
		out, err := run(t, args...)
		if tt.error == "" && err != nil || tt.error != "" && (err == nil || !strings.Contains(err.Error(), tt.error)) {
			t.Errorf("%s: error is %v, want %q", tt.args, err, tt.error)
		}
		for _, want := range tt.out {
			if !strings.Contains(out, want) {
				t.Errorf("%s: %q is missing in\n%s", tt.args, want, out)
			}
		}
	}
}
