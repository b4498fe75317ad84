package registry

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

const zeros = "sha256:0000000000000000000000000000000000000000000000000000000000000000"

func TestParseDocument(t *testing.T) {
	ones := strings.Replace(zeros, "0000", "1111", 1)
	config := `"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"` + zeros + `","size":2}`
	layer := `{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"` + ones + `","size":5,"urls":["http://evil/"],"annotations":{"containerd.io/snapshot/overlay.upperdir":"/","containerd.io/gc.ref.content":"x","org.opencontainers.image.ref.name":"x","org.opencontainers.image.enc.pubopts":"y"}}`
	tests := map[string]struct {
		data    string
		claimed string
		want    string
		err     error
	}{
		"manifest":              {data: `{` + config + `,"layers":[` + layer + `]}`, want: ocispec.MediaTypeImageManifest},
		"typed manifest":        {data: `{"mediaType":"` + images.MediaTypeDockerSchema2Manifest + `",` + config + `}`, want: images.MediaTypeDockerSchema2Manifest},
		"claim is odd":          {data: `{` + config + `}`, claimed: "text/plain", want: ocispec.MediaTypeImageManifest},
		"claim is related":      {data: `{` + config + `}`, claimed: images.MediaTypeDockerSchema2Manifest, want: ocispec.MediaTypeImageManifest},
		"claim contradicts":     {data: `{` + config + `}`, claimed: ocispec.MediaTypeImageIndex, err: errdefs.ErrInvalidArgument},
		"index":                 {data: `{"manifests":[]}`, want: ocispec.MediaTypeImageIndex},
		"type contradicts":      {data: `{"mediaType":"` + ocispec.MediaTypeImageIndex + `",` + config + `}`, err: errdefs.ErrInvalidArgument},
		"both":                  {data: `{"manifests":[],` + config + `}`, err: errdefs.ErrInvalidArgument},
		"neither":               {data: `{}`, err: errdefs.ErrInvalidArgument},
		"not JSON":              {data: `hello`, err: errdefs.ErrInvalidArgument},
		"schema 1":              {data: `{"fsLayers":[{}]}`, err: errdefs.ErrNotImplemented},
		"artifact":              {data: `{"config":{"mediaType":"application/vnd.cncf.helm.config.v1+json","digest":"` + zeros + `","size":2},"layers":[]}`, err: errdefs.ErrInvalidArgument},
		"layer of unknown type": {data: `{` + config + `,"layers":[{"mediaType":"text/html","digest":"` + zeros + `","size":2}]}`, err: errdefs.ErrInvalidArgument},
		"negative size":         {data: `{` + config + `,"layers":[` + strings.Replace(layer, `"size":5`, `"size":-5`, 1) + `]}`, err: errdefs.ErrInvalidArgument},
		"huge config":           {data: `{` + strings.Replace(config, `"size":2`, `"size":33554433`, 1) + `}`, err: errdefs.ErrInvalidArgument},
		"no bytes":              {data: `{` + config + `,"layers":[` + strings.Replace(strings.Replace(layer, `"size":5`, `"size":0`, 1), ones, digest.FromBytes(nil).String(), 1) + `]}`, want: ocispec.MediaTypeImageManifest},
		"no bytes claimed":      {data: `{` + config + `,"layers":[` + strings.Replace(layer, `"size":5`, `"size":0`, 1) + `]}`, err: errdefs.ErrInvalidArgument},
		"two sizes":             {data: `{` + config + `,"layers":[` + strings.Replace(layer, ones, zeros, 1) + `]}`, err: errdefs.ErrInvalidArgument},
		"bad digest":            {data: `{` + config + `,"layers":[` + strings.Replace(layer, ones, `md5:1`, 1) + `]}`, err: errdefs.ErrInvalidArgument},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			desc := ocispec.Descriptor{MediaType: tt.claimed, Digest: digest.FromString(tt.data), Size: int64(len(tt.data))}
			doc, err := ParseDocument(desc, []byte(tt.data))
			if !errors.Is(err, tt.err) {
				t.Fatalf("error %v, want %v", err, tt.err)
			}
			if err != nil {
				return
			}
			if doc.Desc.MediaType != tt.want || (doc.Index == nil) == (doc.Manifest == nil) {
				t.Errorf("document %+v", doc)
			}
			if doc.Manifest != nil && len(doc.Manifest.Layers) > 0 {
				l := doc.Manifest.Layers[0]
				if l.URLs != nil || len(l.Annotations) > 1 {
					t.Errorf("layer decides where it comes from or how it is kept: %+v", l)
				}
				if l.Annotations["org.opencontainers.image.enc.pubopts"] != "y" {
					t.Errorf("decryption is not told what the layer says of it: %+v", l)
				}
			}
		})
	}
	data := []byte(`{"manifests":[]}`)
	good := ocispec.Descriptor{Digest: digest.FromBytes(data), Size: int64(len(data))}
	for name, desc := range map[string]ocispec.Descriptor{
		"wrong digest": {Digest: zeros, Size: good.Size},
		"wrong size":   {Digest: good.Digest, Size: good.Size + 1},
	} {
		if _, err := ParseDocument(desc, data); !errdefs.IsDataLoss(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestParseConfig(t *testing.T) {
	for data, want := range map[string]error{
		`{"rootfs":{"diff_ids":["` + zeros + `"]}}`: nil,
		`{"rootfs":{"diff_ids":["../../x"]}}`:       errdefs.ErrInvalidArgument,
		`[]`:                                        errdefs.ErrInvalidArgument,
		`{"config":{"User":"` + strings.Repeat("u", 4097) + `"}}`: errdefs.ErrInvalidArgument,
	} {
		desc := ocispec.Descriptor{Digest: digest.FromString(data), Size: int64(len(data))}
		if _, err := ParseConfig(desc, []byte(data)); !errors.Is(err, want) {
			t.Errorf("%s: %v", data, err)
		}
		if _, err := ParseConfig(desc, []byte(data+" ")); !errdefs.IsDataLoss(err) {
			t.Errorf("%s with a space: %v", data, err)
		}
	}
}

func TestCandidates(t *testing.T) {
	at := func(n byte, os, arch, variant string) ocispec.Descriptor {
		return ocispec.Descriptor{
			MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromBytes([]byte{n}),
			Platform: &ocispec.Platform{OS: os, Architecture: arch, Variant: variant},
		}
	}
	attestation := at(9, "linux", "arm64", "")
	attestation.Annotations = map[string]string{"vnd.docker.reference.type": "attestation-manifest"}
	anywhere := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromString("any")}
	index := &ocispec.Index{Manifests: []ocispec.Descriptor{
		at(1, "linux", "s390x", ""), attestation, anywhere, at(2, "linux", "arm", "v7"), at(3, "linux", "arm64", ""),
		{MediaType: "text/plain", Digest: digest.FromString("text")},
	}}
	got := Candidates(index, platforms.Only(platforms.MustParse("linux/arm64")))
	want := []digest.Digest{index.Manifests[4].Digest, index.Manifests[3].Digest, anywhere.Digest}
	if len(got) != len(want) {
		t.Fatalf("%d candidates: %v", len(got), got)
	}
	for i := range want {
		if got[i].Digest != want[i] {
			t.Errorf("candidate %d is %v", i, got[i])
		}
	}
}
