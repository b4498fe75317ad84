//go:build integration

package e2e

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// certificate writes a self-signed certificate for 127.0.0.1 and its key into a folder.
func certificate(t *testing.T, dir string) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "node"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	must(t, err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	must(t, err)
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	// The gateway is an ordinary user.
	must(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644))
	must(t, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o644))
	return cert, key
}

func TestStreamsOverTLS(t *testing.T) {
	served, clients := t.TempDir(), t.TempDir()
	must(t, os.Chmod(filepath.Dir(served), 0o755)) // for the gateway
	cert, key := certificate(t, served)
	clientCert, clientKey := certificate(t, clients)
	s := start(t, testenv.Setup{Configure: func(p testenv.Process, settings testenv.Settings) {
		if p == testenv.Gateway {
			settings.Set("streaming.tls_cert_file", cert)
			settings.Set("streaming.tls_key_file", key)
			settings.Set("streaming.tls_client_ca_file", clientCert)
			settings.Set("streaming.tls_min_version", "1.3")
		}
	}})
	s.pull(busybox)
	pod, config := s.pod("tls")
	id := s.container(pod, config, containerConfig("main", "sleep 1000"))

	exec := func(terms rest.TLSClientConfig) (string, error) {
		t.Helper()
		answer, err := s.CRI.Exec(t.Context(), &criv1.ExecRequest{ContainerId: id, Cmd: []string{"cat"}, Stdin: true, Stdout: true})
		must(t, err)
		address, err := url.Parse(answer.GetUrl())
		must(t, err)
		if address.Scheme != "https" {
			t.Fatalf("URL %s", address)
		}
		executor, err := remotecommand.NewSPDYExecutor(&rest.Config{TLSClientConfig: terms}, "POST", address)
		must(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
		defer cancel()
		var out bytes.Buffer
		err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: strings.NewReader("typed"), Stdout: &out})
		return out.String(), err
	}
	known := func() rest.TLSClientConfig {
		ca, err := os.ReadFile(cert)
		must(t, err)
		return rest.TLSClientConfig{CAData: ca, CertFile: clientCert, KeyFile: clientKey}
	}
	first := known()
	if out, err := exec(first); out != "typed" || err != nil {
		t.Errorf("exec = %q, %v", out, err)
	}
	if out, err := exec(rest.TLSClientConfig{CAData: first.CAData}); err == nil {
		t.Errorf("exec without a client certificate = %q", out)
	}
	certificate(t, served)
	if out, err := exec(known()); out != "typed" || err != nil {
		t.Errorf("exec after the certificate was replaced = %q, %v", out, err)
	}
	if out, err := exec(first); err == nil {
		t.Errorf("exec by the old certificate = %q", out)
	}
}
