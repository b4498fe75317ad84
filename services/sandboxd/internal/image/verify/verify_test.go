package verify

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
)

func someDescriptor() ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromString("x"), Size: 7}
}

func TestVerifiersAreTold(t *testing.T) {
	t.Parallel()
	dir, out := t.TempDir(), t.TempDir()
	for _, name := range []string{"1", "2"} {
		imagetest.AddProgram(t, dir, name, fmt.Sprintf(`echo "$@" >%[1]s/%[2]s.args; cat >%[1]s/%[2]s.stdin`, out, name))
	}
	desc := someDescriptor()
	if err := (Programs{Dir: dir, Max: 2, Timeout: time.Minute}).ask(t.Context(), "registry.example/app:1", desc); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"1", "2"} {
		args, err := os.ReadFile(filepath.Join(out, name+".args"))
		if err != nil {
			t.Fatal(err)
		}
		want := "-name registry.example/app:1 -digest " + desc.Digest.String() + " -stdin-media-type " + ocispec.MediaTypeDescriptor + "\n"
		if diff := cmp.Diff(want, string(args)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		stdin, err := os.ReadFile(filepath.Join(out, name+".stdin"))
		if err != nil {
			t.Fatal(err)
		}
		var got ocispec.Descriptor
		if err := json.Unmarshal(stdin, &got); err != nil || !cmp.Equal(desc, got) {
			t.Errorf("%s was given %q, %v", name, stdin, err)
		}
	}
}

func TestVerdicts(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		scripts []string
		max     int
		text    string
	}{
		{name: "accepted", scripts: []string{"exit 0"}},
		{name: "one of two refuses", scripts: []string{"exit 0", "echo no signature; exit 3"}, text: "verifier 1 rejected image (exit code 3): no signature"},
		{name: "too many words", scripts: []string{`head -c 20000 /dev/zero | tr '\0' x; exit 1`}, text: "(cut off)"},
		{name: "killed", scripts: []string{"kill -9 $$"}, text: "verifier 0"},
		{name: "takes too long", scripts: []string{"sleep 100"}, text: "verifier 0"},
		{name: "empty folder", text: "has 0 programs"},
		{name: "too many", scripts: []string{"exit 0", "exit 0"}, max: 1, text: "has 2 programs, 1 to 1 wanted"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			v := Programs{Dir: t.TempDir(), Max: 10, Timeout: time.Minute}
			if tt.max != 0 {
				v.Max = tt.max
			}
			if tt.name == "takes too long" {
				v.Timeout = 100 * time.Millisecond
			}
			for i, script := range tt.scripts {
				imagetest.AddProgram(t, v.Dir, fmt.Sprint(i), script)
			}
			err := v.ask(t.Context(), "app", someDescriptor())
			if (err != nil) != (tt.text != "") {
				t.Fatalf("error %v, want %q", err, tt.text)
			}
			if err != nil && (!strings.Contains(err.Error(), tt.text) || len(err.Error()) > 2*maxReason) {
				t.Errorf("error %v, want %q in it", err, tt.text)
			}
		})
	}
	missing := Programs{Dir: filepath.Join(t.TempDir(), "missing"), Max: 1, Timeout: time.Minute}
	if err := missing.ask(t.Context(), "app", someDescriptor()); err == nil || !strings.Contains(err.Error(), missing.Dir) {
		t.Errorf("missing folder: %v", err)
	}
}

func TestVerifiersEndWithThePull(t *testing.T) {
	t.Parallel()
	v := Programs{Dir: t.TempDir(), Max: 1, Timeout: time.Hour}
	started := filepath.Join(t.TempDir(), "started")
	imagetest.AddProgram(t, v.Dir, "slow", "echo >"+started+"; sleep 3600")
	if err := syscall.Mkfifo(started, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		_, _ = os.ReadFile(started) // returns when the verifier has written
		cancel()
	}()
	if err := v.ask(ctx, "app", someDescriptor()); err == nil {
		t.Error("accepted")
	}
}
