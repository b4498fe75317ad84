package login

import (
	"encoding/base64"
	"fmt"
	"net/url"
	"strings"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Credentials prove to a registry who is asking. The zero value is nobody.
type Credentials struct {
	// Username and Secret are a password login; with an empty Username the Secret is an
	// identity token, to be exchanged for access tokens.
	Username, Secret string
	// Token is a bearer token for the registry itself.
	Token string
	// Server is the host they are for; empty means the registry in the image's name.
	Server string
}

// ParseAuth reads the credentials of a pull request in any of the forms that are in use.
// Errors: ErrInvalidArgument.
func ParseAuth(auth *criv1.AuthConfig) (Credentials, error) {
	c := Credentials{Server: serverHost(auth.GetServerAddress())}
	switch {
	case auth.GetUsername() != "":
		c.Username, c.Secret = auth.GetUsername(), auth.GetPassword()
	case auth.GetIdentityToken() != "":
		c.Secret = auth.GetIdentityToken()
	case auth.GetAuth() != "":
		var err error
		if c.Username, c.Secret, err = decodeAuth(auth.GetAuth()); err != nil {
			return Credentials{}, err
		}
	case auth.GetRegistryToken() != "":
		c.Token = auth.GetRegistryToken()
	}
	return c, nil
}

// decodeAuth splits base64 of "user:password". Only the first colon divides; old writers pad
// with NUL.
func decodeAuth(s string) (user, password string, err error) {
	raw, err := base64.StdEncoding.DecodeString(s)
	if err != nil {
		raw, err = base64.RawStdEncoding.DecodeString(s)
	}
	if err != nil {
		// The cause would show parts of the secret.
		return "", "", fmt.Errorf("auth of the pull request: not base64: %w", errdefs.ErrInvalidArgument)
	}
	user, password, ok := strings.Cut(strings.TrimRight(string(raw), "\x00"), ":")
	if !ok || user == "" {
		return "", "", fmt.Errorf("auth of the pull request: user:password wanted: %w", errdefs.ErrInvalidArgument)
	}
	return user, password, nil
}

// serverHost returns the host of a server address, which may be a URL or a bare host.
func serverHost(address string) string {
	if address == "" {
		return ""
	}
	if u, err := url.Parse(address); err == nil && u.Host != "" {
		return canonicalHost(u.Host)
	}
	host, _, _ := strings.Cut(address, "/")
	return canonicalHost(host)
}

// canonicalHost gives the hosts of one registry the same name.
func canonicalHost(host string) string {
	host = strings.ToLower(host)
	switch host {
	case "docker.io", "index.docker.io", "registry-1.docker.io", "registry.hub.docker.com":
		return "docker.io"
	}
	return strings.TrimSuffix(host, ":443")
}

// For returns the credentials that a configured host of the registry may see. Credentials
// that name a server are for that one only; others are for the registry and for the
// mirrors that the node's operator gave it. A redirect leads to neither.
func (c Credentials) For(host string) Credentials {
	if c.Server != "" && c.Server != canonicalHost(host) {
		return Credentials{}
	}
	return c
}

func (c Credentials) empty() bool { return c.Secret == "" && c.Token == "" }
