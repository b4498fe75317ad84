package image

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

func TestParseQuery(t *testing.T) {
	id := strings.Repeat("0123abcd", 8)
	tests := map[string]query{
		"busybox":                    {name: "docker.io/library/busybox:latest"},
		"user/app:1":                 {name: "docker.io/user/app:1"},
		"r.example:5000/a/b":         {name: "r.example:5000/a/b:latest"},
		"r.example/a:1@sha256:" + id: {name: "r.example/a@sha256:" + id},
		"sha256:" + id:               {digest: "sha256:" + id},
		id:                           {digest: "sha256:" + id},
		id[:12]:                      {name: "docker.io/library/" + id[:12] + ":latest", prefix: "sha256:" + id[:12]},
		"cafe":                       {name: "docker.io/library/cafe:latest"},
	}
	for ref, want := range tests {
		if got, err := parseQuery(ref); err != nil || got != want {
			t.Errorf("%q: %+v %v", ref, got, err)
		}
	}
	for _, ref := range []string{"", " ", "UPPER", "a:b:c", "r.example/", "a@sha256:12", "http://r.example/a", "../../etc"} {
		if got, err := parseQuery(ref); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q: %+v %v", ref, got, err)
		}
	}
}

func FuzzParseQuery(f *testing.F) {
	f.Add("busybox:1@sha256:0")
	f.Fuzz(func(t *testing.T, ref string) {
		q, err := parseQuery(ref)
		if err == nil && q.name == "" && q.digest == "" {
			t.Errorf("%q means nothing", ref)
		}
	})
}

func TestPatterns(t *testing.T) {
	p := newPatterns([]string{
		"registry.k8s.io/pause:*", "*/exact:1", "a.b/c:1", "*keyword*",
		`/quay\.io/(cilium|calico)/.*:v[0-9]+/`, "/ghcr.io/a|ghcr.io/b/", "/[/",
	})
	for name, want := range map[string]bool{
		"registry.k8s.io/pause:3.10": true,
		"registry.k8s.io/other:1":    false,
		"docker.io/x/exact:1":        true,
		"docker.io/x/exact:12":       false,
		"axb/c:1":                    false,
		"docker.io/a-keyword/b:1":    true,
		"quay.io/cilium/agent:v1":    true,
		"quay.io/cilium/agent:1":     false,
		"quayxio/cilium/agent:v1":    false,
		"x.quay.io/cilium/agent:v1":  false,
		"quay.io/cilium/agent:v1-rc": false,
		"ghcr.io/b":                  true,
		"ghcr.io/ab":                 false,
		"/[/":                        true,
	} {
		if got := p.match("other", name); got != want {
			t.Errorf("%q: %v", name, got)
		}
	}
}

func TestUserOf(t *testing.T) {
	for user, want := range map[string]struct {
		uid  int64
		name string
	}{
		"": {-1, ""}, "0": {0, ""}, "1000:5": {1000, ""}, "www-data": {-1, "www-data"}, "www:www": {-1, "www"},
	} {
		uid, name := userOf(user)
		if name != want.name || (uid == nil) != (want.uid < 0) || (uid != nil && uid.GetValue() != want.uid) {
			t.Errorf("%q: %v %q", user, uid, name)
		}
	}
}
