package memory_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/memory"
)

func TestRemembers(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "run")
	f, ids, err := memory.Open(dir)
	if err != nil || len(ids) != 0 {
		t.Fatalf("first start: %v, %v", ids, err)
	}
	want := []plug.ID{{Index: "10", Name: "a"}, {Index: "20", Name: "b"}}
	if err := f.Save(want); err != nil {
		t.Fatal(err)
	}
	_, got, err := memory.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for _, broken := range []string{"", "{", `{"version":9,"active":[{"index":"1"}]}`} {
		if err := os.WriteFile(filepath.Join(dir, "plugins.json"), []byte(broken), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, got, err := memory.Open(dir); err != nil || len(got) != 0 {
			t.Errorf("%q: %v, %v; want nobody and no error", broken, got, err)
		}
	}
}
