package login

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// File holds credentials by host, or by host and the beginning of the repository, as
// docker's config.json does. Programs that hold credentials (credHelpers) are not asked.
type File map[string]Credentials

// ReadFile reads a file of credentials. One that does not exist holds none.
// Errors: ErrFailedPrecondition, which name the file and show nothing of its content.
func ReadFile(path string) (File, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("credentials: %w: %w", errdefs.ErrFailedPrecondition, err)
	}
	var content struct {
		Auths map[string]struct {
			Auth          string `json:"auth"`
			Username      string `json:"username"`
			Password      string `json:"password"`
			IdentityToken string `json:"identitytoken"`
			RegistryToken string `json:"registrytoken"`
		} `json:"auths"`
	}
	if json.Unmarshal(data, &content) != nil {
		// The cause could show parts of a secret.
		return nil, fmt.Errorf("credentials %s: JSON with \"auths\" wanted: %w", path, errdefs.ErrFailedPrecondition)
	}
	out := make(File, len(content.Auths))
	for key, a := range content.Auths {
		auth := &criv1.AuthConfig{
			Username: a.Username, Password: a.Password, Auth: a.Auth,
			IdentityToken: a.IdentityToken, RegistryToken: a.RegistryToken,
		}
		c, err := ParseAuth(auth)
		if err != nil {
			return nil, fmt.Errorf("credentials %s: %q: base64 of user:password wanted: %w", path, key, errdefs.ErrFailedPrecondition)
		}
		out[authKey(key)] = c
	}
	return out, nil
}

// authKey gives all forms of a key one: "https://index.docker.io/v1/" is "docker.io".
func authKey(key string) string {
	_, rest, found := strings.Cut(key, "://")
	if !found {
		rest = key
	}
	host, path, _ := strings.Cut(strings.TrimRight(rest, "/"), "/")
	host = canonicalHost(host)
	if path == "" || path == "v1" || path == "v2" {
		return host
	}
	return host + "/" + path
}

// For returns the credentials for a repository on a host, by the longest key that fits.
func (f File) For(host, repository string) Credentials {
	for key := canonicalHost(host) + "/" + repository; ; {
		if c, ok := f[key]; ok {
			return c
		}
		end := strings.LastIndexByte(key, '/')
		if end < 0 {
			return Credentials{}
		}
		key = key[:end]
	}
}
