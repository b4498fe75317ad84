package decode

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	tarType   = ocispec.MediaTypeImageLayer
	gzipType  = ocispec.MediaTypeImageLayerGzip
	zstdType  = ocispec.MediaTypeImageLayerZstd
	encrypted = gzipType + "+encrypted"
	// long is more patience than a test takes.
	long = time.Minute
)

// shell is a program of the operator's in shell.
func shell(script, returns string, accepts ...string) Program {
	return Program{Name: "test", Accepts: accepts, Returns: returns, Path: "sh", Args: []string{"-c", script}}
}

func compressed(t *testing.T, text string) string {
	t.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	if _, err := io.WriteString(w, text); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.String()
}

// rot13 is a cipher that a shell has.
func rot13(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return 'a' + (r-'a'+13)%26
		case r >= 'A' && r <= 'Z':
			return 'A' + (r-'A'+13)%26
		}
		return r
	}, text)
}

const unrot = "tr 'A-Za-z' 'N-ZA-Mn-za-m'"

// decode reads a layer to its end and closes it.
func decode(t *testing.T, d *Decoder, desc ocispec.Descriptor, r io.Reader) (string, error) {
	t.Helper()
	tar, err := d.Tar(t.Context(), desc, r)
	if err != nil {
		return "", err
	}
	data, err := io.ReadAll(tar)
	if closeErr := tar.Close(); err == nil && closeErr != nil {
		t.Errorf("close: %v", closeErr)
	}
	return string(data), err
}

func TestTar(t *testing.T) {
	big := strings.Repeat("some content ", 100_000)
	for name, tt := range map[string]struct {
		programs []Program
		layer    ocispec.Descriptor
		content  string
		want     string
	}{
		"plain":                         {layer: ocispec.Descriptor{MediaType: tarType}, content: big, want: big},
		"compressed":                    {layer: ocispec.Descriptor{MediaType: gzipType}, content: compressed(t, big), want: big},
		"Docker's type":                 {layer: ocispec.Descriptor{MediaType: "application/vnd.docker.image.rootfs.diff.tar.gzip"}, content: compressed(t, big), want: big},
		"program makes tar":             {programs: []Program{shell(unrot, tarType, "x/secret")}, layer: ocispec.Descriptor{MediaType: "x/secret"}, content: rot13(big), want: big},
		"program makes gzip":            {programs: []Program{shell("cat", gzipType, encrypted)}, layer: ocispec.Descriptor{MediaType: encrypted}, content: compressed(t, big), want: big},
		"program for a known":           {programs: []Program{shell(unrot, tarType, tarType+"+x", gzipType)}, layer: ocispec.Descriptor{MediaType: gzipType}, content: rot13(big), want: big},
		"two programs":                  {programs: []Program{shell(unrot, "x/b", "x/a"), shell(unrot, tarType, "x/b")}, layer: ocispec.Descriptor{MediaType: "x/a"}, content: big, want: big},
		"program that is done":          {programs: []Program{shell("printf all", tarType, "x/a")}, layer: ocispec.Descriptor{MediaType: "x/a"}, content: big, want: "all"},
		"program that says much":        {programs: []Program{shell("yes complaint | head -n 300000 >&2; cat", tarType, "x/a")}, layer: ocispec.Descriptor{MediaType: "x/a"}, content: big, want: big},
		"program that leaves something": {programs: []Program{shell("(sleep 300 >/dev/null) & cat", tarType, "x/a")}, layer: ocispec.Descriptor{MediaType: "x/a"}, content: big, want: big},
		"what it is told": {
			programs: []Program{{Name: "test", Accepts: []string{"x/a"}, Returns: tarType, Path: "sh", Args: []string{"-c", `printf '%s %s %s' "$STREAM_PROCESSOR_MEDIATYPE" "$KEYS" "$1"`, "sh", "argument"}, Env: []string{"KEYS=here"}}},
			layer:    ocispec.Descriptor{MediaType: "x/a"}, want: "x/a here argument",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := decode(t, New(Config{Programs: tt.programs, Patience: long}), tt.layer, strings.NewReader(tt.content))
			if err != nil {
				t.Fatal(err)
			}
			if got != tt.want {
				t.Errorf("%d bytes %.40q, want %d bytes %.40q", len(got), got, len(tt.want), tt.want)
			}
		})
	}
}

func TestPrograms(t *testing.T) {
	const soon = 300 * time.Millisecond
	cut := strings.Repeat("x", 100)
	for name, tt := range map[string]struct {
		program  Program
		content  io.Reader
		patience time.Duration
		want     string
	}{
		"missing":                {program: Program{Name: "test", Accepts: []string{"x/a"}, Returns: tarType, Path: "no-such-program"}, want: "no-such-program"},
		"no program":             {program: Program{Name: "test", Accepts: []string{"x/a"}, Returns: tarType, Path: "/etc"}, want: "permission denied"},
		"fails at once":          {program: shell("echo no key >&2; exit 3", tarType, "x/a"), want: "exit status 3: no key"},
		"fails after its output": {program: shell("cat; echo bad seal >&2; exit 1", tarType, "x/a"), want: "exit status 1: bad seal"},
		"fails and makes gzip":   {program: shell("head -c 20; echo bad seal >&2; exit 1", gzipType, "x/a"), content: strings.NewReader(compressed(t, cut)), want: "exit status 1: bad seal"},
		"is killed":              {program: shell("kill -9 $$", tarType, "x/a"), want: "signal: killed"},
		"says too much":          {program: shell("yes complaint | head -n 300000 >&2; echo at last >&2; exit 1", tarType, "x/a"), want: "(cut off)"},
		"hangs":                  {program: shell("sleep 300", tarType, "x/a"), patience: soon, want: "neither reads nor writes for 300ms"},
		"hangs in the middle":    {program: shell("head -c 10; echo stuck >&2; exec sleep 300", tarType, "x/a"), patience: soon, want: "300ms: stuck"},
		"does not end":           {program: shell("cat; exec >&-; sleep 300", tarType, "x/a"), patience: soon, want: "does not end after its output"},
		"leads nowhere":          {program: shell("cat", "x/b", "x/a"), want: `no stream processor accepts layers of type "x/b"`},
		"leads to itself":        {program: shell("cat", "x/a", "x/a"), want: `no stream processor accepts layers of type "x/a"`},
		"is not for it":          {program: shell("cat", tarType, "x/c"), want: `no stream processor accepts layers of type "x/a"`},
	} {
		t.Run(name, func(t *testing.T) {
			if tt.content == nil {
				tt.content = strings.NewReader(cut)
			}
			if tt.patience == 0 {
				tt.patience = long
			}
			_, err := decode(t, New(Config{Programs: []Program{tt.program}, Patience: tt.patience}), ocispec.Descriptor{MediaType: "x/a"}, tt.content)
			if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error %v, want ErrFailedPrecondition with %q", err, tt.want)
			}
			if len(err.Error()) > 2*maxWords {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
		})
	}
}

func TestTypesThatNeedAProgram(t *testing.T) {
	for _, mediaType := range []string{
		encrypted, tarType + "+encrypted", zstdType + "+encrypted",
		"application/vnd.docker.image.rootfs.diff.tar.gzip+enc", "application/vnd.oci.image.layer.v1.tar+lz9",
	} {
		_, err := decode(t, New(Config{}), ocispec.Descriptor{MediaType: mediaType}, strings.NewReader(""))
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), mediaType) {
			t.Errorf("%s: error %v", mediaType, err)
		}
	}
}

func TestContentThatCannotBeRead(t *testing.T) {
	broken := errors.New("disk is broken")
	d := New(Config{Programs: []Program{shell("cat", tarType, "x/a")}, Patience: long})
	_, err := decode(t, d, ocispec.Descriptor{MediaType: "x/a"}, io.MultiReader(strings.NewReader("some"), iotest.ErrReader(broken)))
	if !errors.Is(err, broken) || errdefs.IsFailedPrecondition(err) {
		t.Errorf("error %v, want that of the content", err)
	}
}

// A program that hangs is blamed, not the one that waits for it.
func TestTheProgramThatHangsIsBlamed(t *testing.T) {
	hangs := shell("sleep 300", "x/b", "x/a")
	hangs.Name = "first"
	d := New(Config{Programs: []Program{hangs, shell("cat", tarType, "x/b")}, Patience: 300 * time.Millisecond})
	_, err := decode(t, d, ocispec.Descriptor{MediaType: "x/a"}, strings.NewReader("some"))
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), `"first"`) {
		t.Errorf("error %v", err)
	}
}

func TestDecryptionProgramsAreToldOfTheLayer(t *testing.T) {
	layer := ocispec.Descriptor{MediaType: "x/a", Size: 4, Annotations: map[string]string{"org.opencontainers.image.enc.keys.jwe": "wrapped"}}
	program := shell("cat <&3", tarType, "x/a")
	got, err := decode(t, New(Config{Programs: []Program{program}, NodeKeys: true, Patience: long}), layer, strings.NewReader("some"))
	if err != nil {
		t.Fatal(err)
	}
	var told anypb.Any
	if err := proto.Unmarshal([]byte(got), &told); err != nil {
		t.Fatal(err)
	}
	var value struct{ Descriptor ocispec.Descriptor }
	if err := json.Unmarshal(told.GetValue(), &value); err != nil {
		t.Fatal(err)
	}
	if told.GetTypeUrl() != "io.containerd.ocicrypt.v1.Payload" || value.Descriptor.Annotations["org.opencontainers.image.enc.keys.jwe"] != "wrapped" {
		t.Errorf("told %s %s", told.GetTypeUrl(), told.GetValue())
	}
	if _, err := decode(t, New(Config{Programs: []Program{program}, Patience: long}), layer, strings.NewReader("some")); err == nil {
		t.Error("without keys of the node, there is something to read at descriptor 3")
	}
}

// What is not wanted any more ends with all that it has started.
func TestProgramsEnd(t *testing.T) {
	for name, end := range map[string]func(cancel func(), tar io.ReadCloser){
		"closed": func(_ func(), tar io.ReadCloser) { _ = tar.Close() },
		"cancelled": func(cancel func(), tar io.ReadCloser) {
			cancel()
			if _, err := io.ReadAll(tar); !errors.Is(err, context.Canceled) {
				t.Errorf("read of a cancelled layer: %v", err)
			}
			_ = tar.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			mark := filepath.Join(dir, "mark")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			program := shell("sh -c 'echo $$ >"+mark+"; echo ready; exec sleep 300' & wait", tarType, "x/a")
			tar, err := New(Config{Programs: []Program{program}, Patience: long}).Tar(ctx, ocispec.Descriptor{MediaType: "x/a"}, strings.NewReader("some"))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(tar, make([]byte, len("ready"))); err != nil {
				t.Fatal(err)
			}
			pid, err := os.ReadFile(mark)
			if err != nil {
				t.Fatal(err)
			}
			end(cancel, tar)
			for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
				// A zombie that nobody has reaped yet is gone, too.
				out, err := exec.CommandContext(t.Context(), "ps", "-o", "stat=", "-p", strings.TrimSpace(string(pid))).Output()
				if err != nil || strings.HasPrefix(string(out), "Z") {
					return
				}
				if time.Now().After(deadline) {
					t.Fatalf("process %s is still there: %s", pid, out)
				}
			}
		})
	}
}
