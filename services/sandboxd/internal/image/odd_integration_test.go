//go:build integration

package image

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
)

// shelf is a registry that serves whatever is put on it, for documents that the other registry
// would not take.
type shelf struct {
	t     *testing.T
	host  string
	items map[string]shelved // by path
}

type shelved struct {
	mediaType string
	data      []byte
}

func newShelf(t *testing.T) *shelf {
	t.Helper()
	s := &shelf{t: t, items: map[string]shelved{"/v2/": {}}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		item, ok := s.items[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", item.mediaType)
		w.Header().Set("Content-Length", strconv.Itoa(len(item.data)))
		_, _ = w.Write(item.data)
	}))
	t.Cleanup(server.Close)
	s.host = strings.TrimPrefix(server.URL, "http://")
	return s
}

func (s *shelf) blob(algorithm digest.Algorithm, mediaType string, data []byte) ocispec.Descriptor {
	desc := ocispec.Descriptor{MediaType: mediaType, Digest: algorithm.FromBytes(data), Size: int64(len(data))}
	s.items["/v2/a/blobs/"+desc.Digest.String()] = shelved{"application/octet-stream", data}
	return desc
}

func (s *shelf) document(algorithm digest.Algorithm, tag, mediaType string, v any) ocispec.Descriptor {
	s.t.Helper()
	data, ok := v.([]byte)
	if !ok {
		var err error
		if data, err = json.Marshal(v); err != nil {
			s.t.Fatal(err)
		}
	}
	desc := ocispec.Descriptor{MediaType: mediaType, Digest: algorithm.FromBytes(data), Size: int64(len(data))}
	for _, ref := range []string{tag, desc.Digest.String()} {
		s.items["/v2/a/manifests/"+ref] = shelved{mediaType, data}
	}
	return desc
}

// Documents that are unusual are understood as far as they can be, and refused with what is wrong;
// nothing is left then. What was understood is found after a restart.
func TestOddDocuments(t *testing.T) {
	const sha256, sha512 = digest.SHA256, digest.SHA512
	const manifestType, indexType = ocispec.MediaTypeImageManifest, ocispec.MediaTypeImageIndex
	s := newShelf(t)
	archive := imagetest.Tar(t, text("f", "x"))
	packed, diffID := imagetest.Compress(t, archive), sha256.FromBytes(archive)
	layer := s.blob(sha256, ocispec.MediaTypeImageLayerGzip, packed)
	config := func(text string) ocispec.Descriptor {
		text = strings.ReplaceAll(text, "ID", `"`+diffID.String()+`"`)
		return s.blob(sha256, ocispec.MediaTypeImageConfig, []byte(text))
	}
	manifest := func(config ocispec.Descriptor, layers ...ocispec.Descriptor) ocispec.Manifest {
		return ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: manifestType, Config: config, Layers: layers}
	}
	index := func(manifests ...ocispec.Descriptor) ocispec.Index {
		return ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: indexType, Manifests: manifests}
	}
	plain := `{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[ID]}}`
	good := manifest(config(plain), layer)
	right := s.document(sha256, "plain", manifestType, good)
	foreign := right
	foreign.Platform = &ocispec.Platform{OS: "linux", Architecture: "s390x"}
	only := s.document(sha256, "foreign", indexType, index(foreign))
	with := func(change func(*ocispec.Descriptor)) ocispec.Manifest {
		l := layer
		change(&l)
		return manifest(good.Config, l)
	}
	deep := right
	for range 6 {
		deep = s.document(sha256, "deep", indexType, index(deep))
	}

	large := func(size int) []byte {
		data, err := json.Marshal(good)
		if err != nil {
			t.Fatal(err)
		}
		return append(data, bytes.Repeat([]byte(" "), size-len(data))...)
	}
	tooLarge := func(size int) func(error) bool {
		return func(err error) bool {
			return errdefs.IsInvalidArgument(err) && !errdefs.IsNotFound(err) && strings.Contains(err.Error(), strconv.Itoa(size)) && strings.Contains(err.Error(), "at most 4194304")
		}
	}

	put := func(name, mediaType string, v any) string { s.document(sha256, name, mediaType, v); return ":" + name }
	tests := map[string]struct {
		ref     string
		refused func(error) bool
	}{
		"manifest with sha512":   {"@" + s.document(sha512, "sha512", manifestType, good).Digest.String(), nil},
		"blobs with sha512":      {put("blobs", manifestType, manifest(s.blob(sha512, ocispec.MediaTypeImageConfig, []byte(strings.ReplaceAll(plain, "ID", `"`+diffID.String()+`"`))), s.blob(sha512, layer.MediaType, packed))), nil},
		"layers with sha512":     {put("diffs512", manifestType, manifest(config(strings.Replace(plain, "ID", strconv.Quote(sha512.FromBytes(archive).String()), 1)), layer)), nil},
		"two kinds of layers":    {put("diffsmixed", manifestType, manifest(config(strings.Replace(plain, "ID", "ID,"+strconv.Quote(sha512.FromBytes(archive).String()), 1)), layer, s.blob(sha256, ocispec.MediaTypeImageLayer, archive))), nil},
		"wrong sha512 of layer":  {put("wrong512", manifestType, manifest(config(strings.Replace(plain, "ID", strconv.Quote(sha512.FromBytes(packed).String()), 1)), layer)), errdefs.IsDataLoss},
		"large":                  {put("large", manifestType, large(4<<20+1)), tooLarge(4<<20 + 1)},
		"larger":                 {put("larger", manifestType, large(6<<20)), tooLarge(6 << 20)},
		"fields of the future":   {put("future", manifestType, manifest(config(strings.Replace(plain, "{", `{"x":{"y":[1]},"config":{"Future":true,"Labels":null,"ExposedPorts":{}},"history":null,"created":null,`, 1)), layer)), nil},
		"no platform":            {put("anywhere", manifestType, manifest(config(`{"rootfs":{"diff_ids":[ID]}}`), layer)), nil},
		"layer three times":      {put("thrice", manifestType, manifest(config(strings.Replace(plain, "ID", "ID,ID,ID", 1)), layer, layer, layer)), nil},
		"many layers":            {put("many", manifestType, manifest(config(strings.Replace(plain, "ID", "ID"+strings.Repeat(",ID", 126), 1)), slices.Repeat([]ocispec.Descriptor{layer}, 127)...)), nil},
		"nested, in the second":  {put("second", indexType, index(only, s.document(sha256, "inner", indexType, index(right)))), nil},
		"parameter of the type":  {put("charset", manifestType+"; charset=utf-8", good), nil},
		"nested deeply":          {":deep", errdefs.IsInvalidArgument},
		"foreign nested":         {put("outer", indexType, index(only)), errdefs.IsNotFound},
		"empty index":            {put("empty", indexType, index()), errdefs.IsNotFound},
		"manifest and index":     {put("both", manifestType, []byte(`{"schemaVersion":2,"manifests":[],"config":{},"layers":[]}`)), errdefs.IsInvalidArgument},
		"nothing":                {put("void", manifestType, []byte{}), errdefs.IsInvalidArgument},
		"other root file system": {put("kind", manifestType, manifest(config(strings.Replace(plain, "layers", "odd", 1)), layer)), errdefs.IsInvalidArgument},
		"configuration is null":  {put("null", manifestType, manifest(config(`null`), layer)), errdefs.IsDataLoss},
		"two sizes":              {put("sizes", manifestType, manifest(config(strings.Replace(plain, "ID", "ID,ID", 1)), layer, with(func(d *ocispec.Descriptor) { d.Size++ }).Layers[0])), errdefs.IsInvalidArgument},
		"upper case":             {put("upper", manifestType, with(func(d *ocispec.Descriptor) { d.Digest = digest.Digest("sha256:" + strings.ToUpper(d.Digest.Encoded())) })), errdefs.IsInvalidArgument},
		"unknown algorithm":      {put("blake", manifestType, with(func(d *ocispec.Descriptor) { d.Digest = digest.Digest("blake3:" + d.Digest.Encoded()) })), errdefs.IsInvalidArgument},
		"name in upper case":     {"@sha256:" + strings.ToUpper(right.Digest.Encoded()), errdefs.IsInvalidArgument},
	}
	n := newNode(t, nil)
	for name, c := range tests {
		if c.refused == nil {
			continue
		}
		if _, err := n.pull(s.host + "/a" + c.ref); !c.refused(err) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	n.wantEmpty()
	var pulled []string
	for name, c := range tests {
		if c.refused != nil {
			continue
		}
		if _, err := n.pull(s.host + "/a" + c.ref); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		pulled = append(pulled, s.host+"/a"+c.ref)
	}
	n.reopen()
	for _, ref := range pulled {
		if diff := cmp.Diff(map[string]string{"f": "x"}, n.tree(ref)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", ref, diff)
		}
	}
}

// typed is a layer with another media type.
type typed struct {
	v1.Layer
	mediaType types.MediaType
}

func (l typed) MediaType() (types.MediaType, error) { return l.mediaType, nil }

// Layers in unusual forms are extracted if their content is beyond doubt.
func TestOddLayers(t *testing.T) {
	half := 700
	gz := func(data []byte) []byte { return imagetest.Compress(t, data) }
	zst := func(data []byte) []byte {
		w, err := zstd.NewWriter(nil)
		if err != nil {
			t.Fatal(err)
		}
		return w.EncodeAll(data, nil)
	}
	pax := func(records map[string]string, kind byte) []byte {
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		if err := w.WriteHeader(&tar.Header{Name: "f", Typeflag: kind, Mode: 0o644, Size: 1, PAXRecords: records}); err != nil {
			t.Fatal(err)
		}
		_, _ = w.Write([]byte("x"))
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return buf.Bytes()
	}
	sparse := imagetest.Tar(t, text("f", "x"))
	copy(sparse[257:], "ustar  \x00")
	copy(sparse[386:], "00000000005\x0000000000001\x00") // one piece of one byte at 5
	copy(sparse[483:], "00000000006\x00")                // of six
	copy(sparse[148:], "        ")
	sparse[156] = tar.TypeGNUSparse
	sum := 0
	for _, b := range sparse[:512] {
		sum += int(b)
	}
	copy(sparse[148:], fmt.Sprintf("%06o\x00 ", sum))
	plain := func(mark string) []byte { return imagetest.Tar(t, text("f", "x"), text(mark, "")) }
	skip := []byte{0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3}
	const zstdType = "application/vnd.oci.image.layer.v1.tar+zstd"
	raw := func(data, archive []byte) v1.Layer { return imagetest.RawLayer(data, digest.FromBytes(archive)) }
	tests := map[string]struct {
		layer   v1.Layer
		refused bool
	}{
		"gzip in two members":    {raw(append(gz(plain("a")[:half]), gz(plain("a")[half:])...), plain("a")), false},
		"zstd announced as gzip": {raw(zst(plain("b")), plain("b")), false},
		"tar announced as gzip":  {raw(plain("c"), plain("c")), false},
		"zstd that skips":        {typed{raw(slices.Concat(skip, zst(plain("d")[:half]), skip, zst(plain("d")[half:]), skip), plain("d")), zstdType}, false},
		"no end of the archive":  {raw(gz(plain("e")[:len(plain("e"))-1024]), plain("e")[:len(plain("e"))-1024]), false},
		"sparse file":            {raw(gz(sparse), sparse), false},
		"contiguous file":        {raw(gz(pax(nil, tar.TypeCont)), pax(nil, tar.TypeCont)), false},
		"attribute of nobody":    {raw(gz(pax(map[string]string{"SCHILY.xattr.nonsense.a": "1"}, tar.TypeReg)), pax(map[string]string{"SCHILY.xattr.nonsense.a": "1"}, tar.TypeReg)), false},
		"garbage behind gzip":    {raw(append(gz(plain("g")), "garbage"...), plain("g")), true},
		"garbage behind zstd":    {typed{raw(append(zst(plain("h")), "garbage"...), plain("h")), zstdType}, true},
		"gzip announced as tar":  {typed{raw(gz(plain("i")), plain("i")), types.OCIUncompressedLayer}, true},
		"attribute too long": {raw(gz(pax(map[string]string{"SCHILY.xattr.user.a": strings.Repeat("x", 70_000)}, tar.TypeReg)),
			pax(map[string]string{"SCHILY.xattr.user.a": strings.Repeat("x", 70_000)}, tar.TypeReg)), true},
		"unknown kind of file": {raw(gz(pax(nil, 'Z')), pax(nil, 'Z')), true},
	}
	n := newNode(t, nil)
	reg := imagetest.NewRegistry(t)
	for name, c := range tests {
		ref := reg.Push(t, strings.ReplaceAll(name, " ", "-")+":1", imagetest.Image(t, v1.Config{}, imagetest.Layer(t, text("low", "")), c.layer))
		_, err := n.pull(ref)
		if c.refused {
			if !errdefs.IsDataLoss(err) || n.present(ref) {
				t.Errorf("%s: error %v", name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := strings.TrimLeft(n.tree(ref)["f"], "\x00"); got != "x" {
			t.Errorf("%s: the file is %q", name, got)
		}
	}
}
