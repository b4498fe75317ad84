package login

import (
	"encoding/base64"
	"net/http"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestParseAuth(t *testing.T) {
	enc := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	tests := map[string]struct {
		auth *criv1.AuthConfig
		want Credentials
		fail bool
	}{
		"nobody":             {auth: nil},
		"empty":              {auth: &criv1.AuthConfig{}},
		"password":           {auth: &criv1.AuthConfig{Username: "u", Password: "p"}, want: Credentials{Username: "u", Secret: "p"}},
		"identity token":     {auth: &criv1.AuthConfig{IdentityToken: "t"}, want: Credentials{Secret: "t"}},
		"registry token":     {auth: &criv1.AuthConfig{RegistryToken: "t"}, want: Credentials{Token: "t"}},
		"auth":               {auth: &criv1.AuthConfig{Auth: enc("u:p")}, want: Credentials{Username: "u", Secret: "p"}},
		"auth with colon":    {auth: &criv1.AuthConfig{Auth: enc("u:p:q:")}, want: Credentials{Username: "u", Secret: "p:q:"}},
		"auth with NUL":      {auth: &criv1.AuthConfig{Auth: enc("u:p\x00\x00\x00")}, want: Credentials{Username: "u", Secret: "p"}},
		"auth unpadded":      {auth: &criv1.AuthConfig{Auth: base64.RawStdEncoding.EncodeToString([]byte("u:pp"))}, want: Credentials{Username: "u", Secret: "pp"}},
		"auth empty secret":  {auth: &criv1.AuthConfig{Auth: enc("u:")}, want: Credentials{Username: "u"}},
		"auth without colon": {auth: &criv1.AuthConfig{Auth: enc("user")}, fail: true},
		"auth not base64":    {auth: &criv1.AuthConfig{Auth: "%%%"}, fail: true},
		"server":             {auth: &criv1.AuthConfig{Username: "u", ServerAddress: "https://Index.docker.io/v1/"}, want: Credentials{Username: "u", Server: "docker.io"}},
		"server host":        {auth: &criv1.AuthConfig{Username: "u", ServerAddress: "r.example:5000/path"}, want: Credentials{Username: "u", Server: "r.example:5000"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := ParseAuth(tt.auth)
			if (err != nil) != tt.fail || (tt.fail && !errdefs.IsInvalidArgument(err)) {
				t.Fatalf("error %v", err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestCredentialsFor(t *testing.T) {
	tests := []struct {
		server, host string
		want         bool
	}{
		{"", "r.example", true},
		{"", "mirror.example", true},
		{"docker.io", "registry-1.docker.io", true},
		{"r.example", "r.example:443", true},
		{"r.example", "mirror.example", false},
		{"r.example:5000", "r.example:6000", false},
		{"mirror.example", "mirror.example", true},
	}
	for _, tt := range tests {
		got := Credentials{Username: "u", Secret: "s", Server: tt.server}.For(tt.host)
		if got.empty() == tt.want {
			t.Errorf("%+v: %v", tt, got)
		}
	}
}

func TestParseChallenges(t *testing.T) {
	tests := map[string]struct {
		lines []string
		want  []challenge
	}{
		"one": {
			[]string{`Bearer realm="https://auth/token",service="r, x",scope="a:b:c d:e:f"`},
			[]challenge{{"bearer", map[string]string{"realm": "https://auth/token", "service": "r, x", "scope": "a:b:c d:e:f"}}},
		},
		"several in one line": {
			[]string{`Basic realm="x", Bearer realm=y,error="invalid_token", Negotiate`},
			[]challenge{{"basic", map[string]string{"realm": "x"}}, {"bearer", map[string]string{"realm": "y", "error": "invalid_token"}}, {"negotiate", map[string]string{}}},
		},
		"several lines":   {[]string{`Basic`, `BEARER Realm="a\"b"`}, []challenge{{"basic", map[string]string{}}, {"bearer", map[string]string{"realm": `a"b`}}}},
		"not closed":      {[]string{`Bearer realm="x`}, []challenge{{"bearer", map[string]string{}}}},
		"without scheme":  {[]string{`realm="x"`}, nil},
		"only separators": {[]string{`,, ,`}, nil},
		"nothing":         {nil, nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got := parseChallenges(http.Header{"Www-Authenticate": tt.lines})
			if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(challenge{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func FuzzParseChallenges(f *testing.F) {
	f.Add(`Bearer realm="https://auth/token",service="r"`)
	f.Add(`Basic realm="x, Bearer =,= "`)
	f.Fuzz(func(t *testing.T, line string) {
		for _, c := range parseChallenges(http.Header{"Www-Authenticate": {line}}) {
			if c.params == nil {
				t.Errorf("%q: no parameters", line)
			}
		}
	})
}
