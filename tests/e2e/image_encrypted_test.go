//go:build integration

package e2e

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/testenv"
)

const encryptedLayer = "application/vnd.oci.image.layer.v1.tar+gzip+encrypted"

// encrypted is a layer whose bytes are all one more than they should be.
type encrypted struct {
	v1.Layer

	plain v1.Layer
}

// DiffID returns the digest of the layer as it was.
func (e encrypted) DiffID() (v1.Hash, error) { return e.plain.DiffID() }

// native gives the image of a name for the machine's platform.
func native(t *testing.T, name string) v1.Image {
	t.Helper()
	all, err := images()
	must(t, err)
	for _, image := range all {
		if image.Name != name {
			continue
		}
		index, err := image.Index.IndexManifest()
		must(t, err)
		img, err := image.Index.Image(index.Manifests[len(index.Manifests)-1].Digest) // the foreign one is the first
		must(t, err)
		return img
	}
	t.Fatalf("no image %s", name)
	return nil
}

// encrypt hides all layers of an image.
func encrypt(t *testing.T, img v1.Image) v1.Image {
	t.Helper()
	layers, err := img.Layers()
	must(t, err)
	config, err := img.ConfigFile()
	must(t, err)
	hidden := mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1)
	for _, layer := range layers {
		r, err := layer.Compressed()
		must(t, err)
		data, err := io.ReadAll(r)
		must(t, err)
		must(t, r.Close())
		for i := range data {
			data[i]++
		}
		hidden, err = mutate.Append(hidden, mutate.Addendum{Layer: encrypted{static.NewLayer(data, encryptedLayer), layer}, MediaType: encryptedLayer})
		must(t, err)
	}
	made, err := hidden.ConfigFile()
	must(t, err)
	made = made.DeepCopy()
	made.OS, made.Architecture, made.Config = config.OS, config.Architecture, config.Config
	hidden, err = mutate.ConfigFile(hidden, made)
	must(t, err)
	return hidden
}

// A layer that only a program of the operator can read.
func TestEncryptedImages(t *testing.T) {
	key := filepath.Join(t.TempDir(), "key")
	s := start(t, testenv.Setup{Configure: func(p testenv.Process, settings testenv.Settings) {
		if p != testenv.Sandboxd {
			return
		}
		settings.Set("image.stream_processors.shift", map[string]any{
			"accepts": []string{encryptedLayer}, "returns": string(types.OCILayer), "path": "sh", "env": []string{"KEY_FILE=" + key},
			"args": []string{"-c", `test -e "$KEY_FILE" || { echo "$KEY_FILE is missing" >&2; exit 1; }; LC_ALL=C tr '\001-\377\000' '\000-\377'`},
		})
	}})
	const secret = "crisp.local/secret:1"
	must(t, s.Registry.Add(t.Context(), fixture.Image{Name: secret, Plain: encrypt(t, native(t, busybox))}))

	pull := func() error {
		_, err := s.Images.PullImage(t.Context(), &criv1.PullImageRequest{Image: &criv1.ImageSpec{Image: secret}})
		return err
	}
	if err := pull(); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), key+" is missing") {
		t.Errorf("pull without the key: %v", err)
	}
	list, err := s.Images.ListImages(t.Context(), &criv1.ListImagesRequest{})
	must(t, err)
	if len(list.GetImages()) > 0 {
		t.Errorf("images that cannot be read: %v", list.GetImages())
	}
	blobs, err := filepath.Glob(s.Path("lib", "images", "content", "blobs", "sha256", "*"))
	must(t, err)
	if len(blobs) > 0 {
		t.Errorf("left of the pull: %d blobs", len(blobs))
	}

	must(t, os.WriteFile(key, nil, 0o600))
	must(t, pull())
	pod, config := s.pod("secret")
	container := containerConfig("main", "echo it runs")
	container.Image = &criv1.ImageSpec{Image: secret}
	id := s.container(pod, config, container)
	if code := s.waitExit(id).GetExitCode(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	eventually(t, "the container has written its line", func() error {
		log, err := os.ReadFile(s.Path("podlogs", "secret", "main.log"))
		if err == nil && !bytes.Contains(log, []byte("it runs")) {
			err = fmt.Errorf("log is %q", log)
		}
		return err
	})
}
