package crispshim

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

func TestInfoTellsWhatTheRuntimeCan(t *testing.T) {
	dir := t.TempDir()
	runtime := func(name, script string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		return path
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	runtime("runc", `[ "$1" = features ] && echo '{"mountOptions":["rro"]}'`)
	info := func(binary string) (*types.RuntimeInfo, error) {
		var stdin []byte
		if binary != "" {
			value, err := proto.Marshal(&options.Options{BinaryName: binary})
			if err != nil {
				t.Fatal(err)
			}
			if stdin, err = proto.Marshal(&anypb.Any{TypeUrl: optionsType, Value: value}); err != nil {
				t.Fatal(err)
			}
		}
		var out, errs bytes.Buffer
		var got types.RuntimeInfo
		err := Main(t.Context(), []string{"-info"}, bytes.NewReader(stdin), &out, &errs)
		if err == nil {
			err = proto.Unmarshal(out.Bytes(), &got)
		}
		return &got, err
	}
	for binary, want := range map[string]string{
		"":                                      "{\"mountOptions\":[\"rro\"]}\n",
		runtime("other", `echo '{"hooks":[]}'`): "{\"hooks\":[]}\n",
		runtime("old", "exit 1"):                "",
		runtime("odd", "echo no JSON"):          "",
	} {
		got, err := info(binary)
		if err != nil || string(got.GetFeatures().GetValue()) != want || got.GetName() != Name {
			t.Errorf("%q: %v, %v", binary, got, err)
		}
	}
	if _, err := info(filepath.Join(dir, "absent")); !errdefs.IsNotFound(err) {
		t.Errorf("absent runtime: %v", err)
	}
}
