package memory_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/memory"
)

func open(t *testing.T, folder string) (*memory.Ledger, object.Past) {
	t.Helper()
	l, past, err := memory.OpenLedger(folder, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l, past
}

func TestLedgerSurvivesAKill(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	l, past := open(t, folder)
	if len(past.Told)+len(past.Pods) != 0 {
		t.Errorf("new ledger holds %v", past)
	}
	a, b := plug.ID{Index: "10", Name: "a"}, plug.ID{Index: "20", Name: "b"}
	pod := &nri.PodSandbox{Id: "p", Name: "web", Namespace: "prod"}
	l.Object(pod, nil)
	l.Object(pod, &nri.Container{Id: "c", PodSandboxId: "p", Name: "main"})
	l.Object(pod, &nri.Container{Id: "old", PodSandboxId: "p"})
	l.Told(a, "p", object.Known)
	l.Told(a, "c", object.Known)
	l.Told(a, "c", object.Stopped)
	l.Told(b, "old", object.Known)
	l.Told(b, "old", object.Removed)
	// It is killed here, in the middle of a line.
	f, err := os.OpenFile(filepath.Join(folder, "ledger.jsonl"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = f.WriteString(`{"o":"half`)
	_ = f.Close()

	_, past = open(t, folder)
	if past.Pods["p"].GetName() != "web" || past.Containers["c"].GetName() != "main" || past.Told[a]["c"] != object.Stopped || past.Told[a]["p"] != object.Known {
		t.Errorf("remembered is %v", past)
	}
	if past.Containers["old"] != nil || len(past.Told[b]) != 0 {
		t.Errorf("what is over is remembered: %v", past)
	}
}

func TestLedgerDoesNotGrow(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	l, _ := open(t, folder)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { l.Run(ctx) })
	defer running.Wait()
	defer cancel()
	a := plug.ID{Index: "10", Name: "a"}
	for i := range 30_000 {
		id := strconv.Itoa(i)
		l.Object(&nri.PodSandbox{Id: id}, nil)
		l.Told(a, id, object.Known)
		l.Told(a, id, object.Removed)
	}
	l.Object(&nri.PodSandbox{Id: "last"}, nil)
	l.Told(a, "last", object.Stopped)
	testkit.Eventually(t, testkit.Patience, func() error {
		info, err := os.Stat(filepath.Join(folder, "ledger.jsonl"))
		if err == nil && info.Size() > 5<<20 {
			return fmt.Errorf("it has %d bytes for nothing that matters", info.Size())
		}
		return err
	})
	if _, past := open(t, folder); past.Told[a]["last"] != object.Stopped || len(past.Told[a]) != 1 {
		t.Errorf("what was written while the file was made anew is lost: %v", past.Told)
	}
}
