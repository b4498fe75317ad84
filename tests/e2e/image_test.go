//go:build integration

package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/testenv"
)

// An image's life with crictl, through a mirror for all registries.
func TestImageLifeWithCrictl(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.crictl("pull", busybox)
	contains(t, s.crictl("images"), "registry.k8s.io/e2e-test-images/busybox", "1.29-2")
	var inspected struct {
		Status struct {
			ID          string   `json:"id"`
			RepoTags    []string `json:"repoTags"`
			RepoDigests []string `json:"repoDigests"`
			Size        string   `json:"size"`
		} `json:"status"`
	}
	must(t, json.Unmarshal([]byte(s.crictl("inspecti", busybox)), &inspected))
	if !slices.Equal(inspected.Status.RepoTags, []string{busybox}) || len(inspected.Status.RepoDigests) != 1 || inspected.Status.Size == "0" {
		t.Errorf("inspecti = %+v", inspected.Status)
	}
	// Each way to name the image finds it.
	for _, name := range []string{inspected.Status.ID, strings.TrimPrefix(inspected.Status.ID, "sha256:")[:12], inspected.Status.RepoDigests[0]} {
		s.crictl("inspecti", name)
	}
	if !slices.ContainsFunc(s.Registry.Requests(), func(r string) bool { return strings.Contains(r, "/v2/e2e-test-images/busybox/") }) {
		t.Errorf("the mirror was not asked: %q", s.Registry.Requests())
	}
	s.crictl("rmi", busybox)
	if out := s.crictl("images", "-q"); out != "" {
		t.Errorf("images after rmi: %q", out)
	}
}

// Of an index with two platforms the machine's own is taken.
func TestPullChoosesThePlatform(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	pod, config := s.pod("platform")
	id := s.container(pod, config, containerConfig("main", "test ! -e /wrong-platform"))
	if code := s.waitExit(id).GetExitCode(); code != 0 {
		t.Errorf("exit code %d: the image of the foreign platform runs", code)
	}
}

func TestPullFromRegistriesWithAuthentication(t *testing.T) {
	s := start(t, testenv.Setup{})
	must(t, os.RemoveAll(s.Path("hosts", "_default")))
	for name, scheme := range map[string]fixture.Scheme{"basic": fixture.BasicAuth, "bearer": fixture.BearerAuth} {
		t.Run(name, func(t *testing.T) {
			host := guarded(t, scheme).Addr()
			image := host + "/e2e-test-images/busybox:1.29-2"
			if _, err := s.Crictl(t.Context(), "pull", image); err == nil {
				t.Error("pull without credentials succeeded")
			}
			if _, err := s.Crictl(t.Context(), "pull", "--creds", "me:wrong", image); err == nil {
				t.Error("pull with a wrong password succeeded")
			}
			if _, err := s.Crictl(t.Context(), "pull", "--creds", "me:secret", image); err != nil {
				t.Error(err)
			}
		})
	}
}

// Credentials that name no server are for whatever serves the image, which may
// be a mirror.
func TestCredentialsReachTheMirror(t *testing.T) {
	s := start(t, testenv.Setup{})
	must(t, fixture.WriteHosts(s.Path("hosts"), guarded(t, fixture.BearerAuth).Addr(), "private.example"))
	s.crictl("pull", "--creds", "me:secret", "private.example/e2e-test-images/busybox:1.29-2")
}

// guarded serves all images to the user me with the password secret.
func guarded(t *testing.T, scheme fixture.Scheme) *fixture.Registry {
	t.Helper()
	all, err := images()
	must(t, err)
	registry, err := fixture.Serve(t.Context(), fixture.Config{Auth: fixture.Auth{Scheme: scheme, User: "me", Password: "secret"}}, all)
	must(t, err)
	t.Cleanup(func() { _ = registry.Close() })
	return registry
}

// A registry on loopback is spoken to in plain HTTP without any configuration.
func TestPullFromLoopbackWithoutConfiguration(t *testing.T) {
	s := start(t, testenv.Setup{})
	must(t, os.RemoveAll(s.Path("hosts", "_default")))
	s.crictl("pull", s.Registry.Addr()+"/e2e-test-images/busybox:1.29-2")
}

// An image that a verifier refuses is not pulled, and the caller is told why in kubelet's form.
func TestPullOfRefusedImage(t *testing.T) {
	verifiers := t.TempDir()
	const script = `#!/bin/sh
case $2 in registry.k8s.io/*) exit 0 ;; esac
echo "$2 is not signed"
exit 1
`
	must(t, os.WriteFile(filepath.Join(verifiers, "by-name"), []byte(script), 0o755))
	s := start(t, testenv.Setup{Configure: func(p testenv.Process, c testenv.Settings) {
		if p == testenv.Sandboxd {
			c.Set("image.verifier_dir", verifiers)
		}
	}})
	s.pull(busybox)
	refused := s.Registry.Addr() + "/e2e-test-images/busybox:1.29-2"
	_, err := s.Images.PullImage(t.Context(), &criv1.PullImageRequest{Image: &criv1.ImageSpec{Image: refused}})
	if status.Code(err) != codes.Unknown || !strings.HasPrefix(status.Convert(err).Message(), "SignatureValidationFailed: ") {
		t.Fatalf("PullImage = %v", err)
	}
	contains(t, err.Error(), refused, "sha256:", "by-name", refused+" is not signed")
	if out := s.crictl("images"); strings.Contains(out, s.Registry.Addr()) {
		t.Errorf("images after the refusal: %s", out)
	}
}
