package command

import (
	"testing"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

func TestParseFeatures(t *testing.T) {
	for name, c := range map[string]struct {
		json string
		want Features
	}{
		"silent":        {"", Features{}},
		"old":           {`{"mountOptions":["ro"],"linux":{"namespaces":["user"]}}`, Features{}},
		"without idmap": {`{"mountOptions":["rro"],"linux":{"namespaces":["user"],"mountExtensions":{"idmap":{"enabled":false}}}}`, Features{RecursiveReadOnly: true}},
		"no userns":     {`{"linux":{"namespaces":["pid"],"mountExtensions":{"idmap":{"enabled":true}}}}`, Features{}},
		"full":          {`{"mountOptions":["rro"],"linux":{"namespaces":["user"],"mountExtensions":{"idmap":{"enabled":true}}}}`, Features{true, true}},
	} {
		t.Run(name, func(t *testing.T) {
			info := &types.RuntimeInfo{Name: "x"}
			if c.json != "" {
				info.Features = &anypb.Any{TypeUrl: "features", Value: []byte(c.json)}
			}
			answer, err := proto.Marshal(info)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := parseFeatures(answer); err != nil || got != c.want {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
	if _, err := parseFeatures([]byte("usage: shim")); !errdefs.IsDataLoss(err) {
		t.Errorf("text for an answer: %v", err)
	}
}
