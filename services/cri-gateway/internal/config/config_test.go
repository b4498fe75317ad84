package config_test

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/config"
	kit "github.com/crisp-cri/crisp/services/internal/config"
)

func TestExampleIsTheDefault(t *testing.T) {
	want, err := os.ReadFile("../../config.example.toml")
	if err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	if err := kit.Dump(&got, config.Default()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("config.example.toml is not the output of \"config default\" (-file +default):\n%s", diff)
	}
	decoded := config.Config{}
	if err := kit.Decode(&got, &decoded); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(config.Default(), decoded); diff != "" {
		t.Errorf("the example does not decode to the default (-want +got):\n%s", diff)
	}
}

func TestValidate(t *testing.T) {
	for _, tt := range []struct{ text, complaint string }{
		{"version = 1", ""},
		{"version = 2", "version: "},
		{"[cri.socket]\npath = '/var/run/crio/crio.sock'", "cri.socket.path: "},
		{"[cri]\nmax_message = '4MiB'", "cri.max_message: "},
		{"[sandboxd]\nsocket = 'x'", "sandboxd.socket: "},
		{"[nri]\nunavailable = 'maybe'", "nri.unavailable: "},
		{"[nri]\nunavailable = 'fail'", ""},
		{"[streaming]\nlisten = 'here'", "streaming.listen: "},
		{"[streaming]\ntls_cert_file = '/a'", "streaming.tls_cert_file: "},
		{"[streaming]\ntls_client_ca_file = '/a'", "streaming.tls_client_ca_file: "},
		{"[streaming]\ntls_cert_file = '/a'\ntls_key_file = '/b'\ntls_client_ca_file = '/c'\ntls_min_version = '1.3'", ""},
		{"[streaming]\ntls_min_version = '1.1'", "streaming.tls_min_version: "},
		{"[streaming]\ntls_cipher_suites = ['TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256']", ""},
		{"[streaming]\ntls_cipher_suites = ['TLS_RSA_WITH_RC4_128_SHA']", "streaming.tls_cipher_suites: "},
		{"[streaming]\ntls_cipher_suites = ['TLS_AES_128_GCM_SHA256']", "streaming.tls_cipher_suites: "}, // of TLS 1.3
		{"[operations]\nlimit = '0s'", "operations.limit: "},
		{"[events]\nurl = ''", ""},
		{"[nri]\nhodl = '1s'", "hodl"},
	} {
		t.Run(tt.text, func(t *testing.T) {
			cfg := config.Default()
			err := kit.Decode(strings.NewReader(tt.text), &cfg)
			switch {
			case tt.complaint == "" && err != nil:
				t.Errorf("unexpected error %v", err)
			case tt.complaint != "" && (err == nil || !strings.Contains(err.Error(), tt.complaint)):
				t.Errorf("error %v, want one about %s", err, tt.complaint)
			}
		})
	}
}
