package app

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/crisp-cri/crisp/services/eventbus/internal/broker"
	"github.com/crisp-cri/crisp/services/internal/config"
)

func TestExampleIsTheDefault(t *testing.T) {
	t.Parallel()
	var want bytes.Buffer
	if err := config.Dump(&want, Default()); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile("../../config.example.toml")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want.String(), string(got)); diff != "" {
		t.Errorf("config.example.toml differs from \"eventbus config default\":\n%s", diff)
	}
	var cfg Config
	if err := config.Decode(bytes.NewReader(got), &cfg); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Default(), cfg); diff != "" {
		t.Error(diff)
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		change func(c *Config)
		want   string
	}{
		"default":          {func(*Config) {}, ""},
		"off loopback":     {func(c *Config) { c.Broker.Listen = "0.0.0.0:4222" }, "broker.listen:"},
		"all interfaces":   {func(c *Config) { c.Broker.Listen = ":4222" }, "broker.listen:"},
		"allowed insecure": {func(c *Config) { c.Broker.Listen, c.Broker.AllowInsecure = ":4222", true }, ""},
		"with tls": {func(c *Config) {
			c.Broker.Listen, c.Broker.TLS = ":4222", broker.TLSConfig{CertFile: "c", KeyFile: "k"}
		}, ""},
		"half a certificate": {func(c *Config) { c.Broker.TLS.CertFile = "c" }, "broker.tls.cert_file:"},
		"store too small":    {func(c *Config) { c.Broker.MaxStore = 64 * config.MiB }, "stream.max_bytes:"},
		"external": {func(c *Config) {
			c.Broker = broker.Config{URL: "tls://nats.example:4222"}
		}, ""},
		"bad external":    {func(c *Config) { c.Broker.URL = "nats.example" }, "broker.url:"},
		"leaf, no domain": {func(c *Config) { c.Broker.LeafRemotes = []broker.LeafRemote{{URL: "tls://hub:7422"}} }, "broker.domain:"},
		"stream name":     {func(c *Config) { c.Stream.Name = "a.b" }, "stream.name:"},
		"replicas":        {func(c *Config) { c.Stream.Replicas = 9 }, "stream.replicas:"},
		"window":          {func(c *Config) { c.Stream.MaxAge = 1 }, "stream.max_age:"},
		"keys":            {func(c *Config) { c.Access.KeysDir = "keys" }, "access.keys_dir:"},
		"version":         {func(c *Config) { c.Version = 2 }, "version:"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := Default()
			tc.change(&cfg)
			err := cfg.Validate()
			switch {
			case tc.want == "" && err != nil:
				t.Errorf("got %v", err)
			case tc.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tc.want)):
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestTailFindsTheBus(t *testing.T) {
	t.Parallel()
	for listen, want := range map[string]string{
		"127.0.0.1:4222": "nats://127.0.0.1:4222", ":4333": "nats://127.0.0.1:4333", "0.0.0.0:4222": "nats://127.0.0.1:4222",
		"[::1]:4222": "nats://[::1]:4222",
	} {
		if got := dialURL(listen, false); got != want {
			t.Errorf("%s: got %s, want %s", listen, got, want)
		}
	}
}
