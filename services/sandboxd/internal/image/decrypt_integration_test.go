//go:build integration

package image

import (
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/decode"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
)

const encryptedLayer = "application/vnd.oci.image.layer.v1.tar+gzip+encrypted"

// secret is a layer that nobody can read without the program of [decrypting].
type secret struct {
	v1.Layer

	plain v1.Layer
}

// DiffID returns the digest of what the program makes of it.
func (s secret) DiffID() (v1.Hash, error) { return s.plain.DiffID() }

func secretImage(t *testing.T, mark string) v1.Image {
	t.Helper()
	file := imagetest.File{Name: "mark", Body: mark}
	plain := imagetest.Layer(t, file)
	var shifted []byte
	for _, b := range imagetest.Compress(t, imagetest.Tar(t, file)) {
		shifted = append(shifted, b+1)
	}
	hidden := secret{Layer: static.NewLayer(shifted, encryptedLayer), plain: plain}
	img := imagetest.Image(t, v1.Config{Cmd: []string{"/bin/true"}}, imagetest.Layer(t, imagetest.File{Name: "base", Body: "base"}))
	img, err := mutate.Append(img, mutate.Addendum{Layer: hidden, MediaType: encryptedLayer})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// decrypting is a node with a program for such layers.
func decrypting(t *testing.T, script string) *node {
	t.Helper()
	return newNode(t, func(c *Config, _ *storage.Config) {
		c.ProgressTimeout = time.Minute
		if script == "hang" {
			c.ProgressTimeout, script = time.Second, "exec sleep 300"
		}
		if script != "" {
			c.Decode.Programs = []decode.Program{{
				Name: "shift", Accepts: []string{encryptedLayer}, Returns: string(types.OCILayer), Path: "sh", Args: []string{"-c", script},
			}}
		}
	})
}

const unshift = `LC_ALL=C exec tr '\001-\377\000' '\000-\377'`

func TestPullOfEncryptedImages(t *testing.T) {
	n := decrypting(t, unshift)
	reg := imagetest.NewRegistry(t)
	name := reg.Push(t, "app:1", secretImage(t, "in the clear"))
	n.mustPull(name)
	if got := n.read(name, "mark") + n.read(name, "base"); got != "in the clearbase" {
		t.Errorf("image has %q", got)
	}
	removeAll(t, n.root, "overlayfs/snapshots/*/fs/mark/..")
	n.mustPull(name) // mends by way of the program, too
	if got := n.read(name, "mark"); got != "in the clear" {
		t.Errorf("mended image has %q", got)
	}
}

func TestEncryptedImagesThatCannotBeRead(t *testing.T) {
	for name, tt := range map[string]struct{ script, want string }{
		"no program":        {"", `no stream processor accepts layers of type "` + encryptedLayer + `"`},
		"program fails":     {"echo no key for it >&2; exit 1", "exit status 1: no key for it"},
		"program hangs":     {"hang", "neither reads nor writes for 1s"},
		"program is wrong":  {unshift + " | tr in ni", ""},
		"program goes on":   {unshift + " | gzip -d; cat /dev/zero", ""},
		"wrong from middle": {unshift + " | head -c 60; echo wrong key >&2; exit 2", "exit status 2: wrong key"},
	} {
		t.Run(name, func(t *testing.T) {
			n := decrypting(t, strings.ReplaceAll(tt.script, "exec tr '", "tr '"))
			reg := imagetest.NewRegistry(t)
			ref := reg.Push(t, "app:1", secretImage(t, "in the clear"))
			_, err := n.pull(ref)
			if tt.want == "" {
				if !errdefs.IsDataLoss(err) {
					t.Errorf("error %v, want ErrDataLoss", err)
				}
			} else if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want ErrFailedPrecondition with %q", err, tt.want)
			}
			if n.present(ref) {
				t.Error("the image is shown")
			}
			n.wantEmpty()
		})
	}
}
