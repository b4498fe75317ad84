package streaming_test

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/gorilla/websocket"
	"go.uber.org/goleak"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/streaming/pkg/httpstream/spdy"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/streaming/listen"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

// tlsServer returns the configuration of a server by the files, and the log of it.
func tlsServer(t *testing.T, files listen.TLSFiles) (*tls.Config, *bytes.Buffer) {
	t.Helper()
	var log bytes.Buffer
	config, err := listen.NewTLS(files, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	return config, &log
}

// trusting returns the configuration of a client that trusts an authority.
func trusting(t *testing.T, ca string) *tls.Config {
	t.Helper()
	pem, err := os.ReadFile(ca)
	if err != nil {
		t.Fatal(err)
	}
	config := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	config.RootCAs.AppendCertsFromPEM(pem)
	return config
}

// showing is a client's configuration that presents a certificate, whomever the server asks for.
func showing(t *testing.T, client *tls.Config, cert, key string) *tls.Config {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	client = client.Clone()
	client.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	return client
}

// reach asks the server for a URL that it does not have, and says whether there was an answer.
func (b *bench) reach(t *testing.T, client *tls.Config) error {
	t.Helper()
	target := b.execURL(t, &criv1.ExecRequest{ContainerId: "c", Cmd: []string{"cat"}, Stdout: true})
	transport := &http.Transport{TLSClientConfig: client}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, target+"-unknown", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return errors.Join(err, resp.Body.Close())
}

func TestSessionsOverTLS(t *testing.T) {
	// Closing TLS on a connection that the other side has closed is an error, which the SPDY
	// library holds for a second.
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() { testkit.Eventually(t, 30*time.Second, func() error { return goleak.Find(before) }) })
	cert, key := testkit.Certificate(t)
	server, _ := tlsServer(t, listen.TLSFiles{Cert: cert, Key: key, MinVersion: tls.VersionTLS12})
	b := newTLSBench(t, server)
	request := &criv1.ExecRequest{ContainerId: "c", Cmd: []string{"sum"}, Stdin: true, Stdout: true}
	sum := sha256.Sum256([]byte("through"))
	for name, dial := range map[string]func(t *testing.T, target string) session{
		"SPDY": func(t *testing.T, target string) session {
			t.Helper()
			rt, err := spdy.NewRoundTripper(trusting(t, cert))
			if err != nil {
				t.Fatal(err)
			}
			return openSPDY(t, upgradeWith(t, rt, target, "v4.channel.k8s.io"), "stdin", "stdout")
		},
		"WebSocket": func(t *testing.T, target string) session {
			t.Helper()
			return dialWebSocketWith(t, &websocket.Dialer{TLSClientConfig: trusting(t, cert)}, target, "v5.channel.k8s.io")
		},
	} {
		t.Run(name, func(t *testing.T) {
			target := b.execURL(t, request)
			if !strings.HasPrefix(target, "https://") {
				t.Fatalf("URL %s", target)
			}
			s := dial(t, target)
			s.stdin(t, []byte("through"))
			s.closeStdin(t)
			out, _, outcome := s.read(t)
			if out != hex.EncodeToString(sum[:]) || !strings.Contains(outcome, "Success") {
				t.Errorf("output %q, outcome %q", out, outcome)
			}
		})
	}
}

func TestTLSTerms(t *testing.T) {
	cert, key := testkit.Certificate(t)
	clientCert, clientKey := testkit.Certificate(t)
	otherCert, otherKey := testkit.Certificate(t)
	plain := listen.TLSFiles{Cert: cert, Key: key, MinVersion: tls.VersionTLS12}
	with := func(change func(*listen.TLSFiles)) listen.TLSFiles {
		f := plain
		change(&f)
		return f
	}
	wanted := with(func(f *listen.TLSFiles) { f.ClientCA = clientCert })
	newer := with(func(f *listen.TLSFiles) { f.MinVersion = tls.VersionTLS13 })
	suite := with(func(f *listen.TLSFiles) { f.CipherSuites = []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384} })
	older := trusting(t, cert)
	older.MaxVersion = tls.VersionTLS12
	oneSuite := older.Clone()
	oneSuite.CipherSuites = []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256}
	for name, tt := range map[string]struct {
		server listen.TLSFiles
		client *tls.Config
		bad    bool
	}{
		"certificate of no trusted authority": {server: plain, client: trusting(t, otherCert), bad: true},
		"client without certificate":          {server: wanted, client: trusting(t, cert), bad: true},
		"client of another authority":         {server: wanted, client: showing(t, trusting(t, cert), otherCert, otherKey), bad: true},
		"client of the authority":             {server: wanted, client: showing(t, trusting(t, cert), clientCert, clientKey)},
		"old version":                         {server: newer, client: older, bad: true},
		"old version that may be":             {server: plain, client: older},
		"new version":                         {server: newer, client: trusting(t, cert)},
		"suite that is offered":               {server: suite, client: older},
		"suite that is not offered":           {server: suite, client: oneSuite, bad: true},
	} {
		t.Run(name, func(t *testing.T) {
			server, _ := tlsServer(t, tt.server)
			if err := newTLSBench(t, server).reach(t, tt.client); (err != nil) != tt.bad {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestTLSFilesAreReloaded(t *testing.T) {
	dir := t.TempDir()
	files := listen.TLSFiles{
		Cert: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key"), ClientCA: filepath.Join(dir, "ca"), MinVersion: tls.VersionTLS12,
	}
	replace := func(path, from string) {
		t.Helper()
		data, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(path, data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	cert, key := testkit.Certificate(t)
	newCert, newKey := testkit.Certificate(t)
	replace(files.Cert, cert)
	replace(files.Key, key)
	replace(files.ClientCA, cert)
	server, log := tlsServer(t, files)
	b := newTLSBench(t, server)
	old := showing(t, trusting(t, cert), cert, key)
	works := func(what string, client *tls.Config) {
		t.Helper()
		if err := b.reach(t, client); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	works("at first", old)

	replace(files.Cert, newCert)
	works("a new certificate without its key", old)
	works("and once more", old)
	if n := strings.Count(log.String(), "not reloaded"); n != 1 {
		t.Errorf("told %d times of files that do not fit:\n%s", n, log)
	}
	replace(files.Key, newKey)
	works("a new certificate", showing(t, trusting(t, newCert), cert, key))
	if b.reach(t, old) == nil {
		t.Error("the old certificate is still in use")
	}

	replace(files.ClientCA, newCert)
	works("a new client authority", showing(t, trusting(t, newCert), newCert, newKey))
	if b.reach(t, showing(t, trusting(t, newCert), cert, key)) == nil {
		t.Error("clients of the old authority are still let in")
	}

	if err := os.Remove(files.ClientCA); err != nil {
		t.Fatal(err)
	}
	works("a client authority that is gone", showing(t, trusting(t, newCert), newCert, newKey))
	if b.reach(t, trusting(t, newCert)) == nil {
		t.Error("without its file, clients need no certificate")
	}
}

func TestSenselessTLSFilesAreRefused(t *testing.T) {
	cert, key := testkit.Certificate(t)
	_, otherKey := testkit.Certificate(t)
	for name, tt := range map[string]struct {
		files listen.TLSFiles
		err   error
		named string
	}{
		"no certificate":     {listen.TLSFiles{Cert: "/nowhere/cert", Key: key}, fs.ErrNotExist, "/nowhere/cert"},
		"no key":             {listen.TLSFiles{Cert: cert, Key: "/nowhere/key"}, fs.ErrNotExist, "/nowhere/key"},
		"key of another":     {listen.TLSFiles{Cert: cert, Key: otherKey}, errdefs.ErrInvalidArgument, otherKey},
		"no authority":       {listen.TLSFiles{Cert: cert, Key: key, ClientCA: "/nowhere/ca"}, fs.ErrNotExist, "/nowhere/ca"},
		"authority is a key": {listen.TLSFiles{Cert: cert, Key: key, ClientCA: key}, errdefs.ErrInvalidArgument, key},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := listen.NewTLS(tt.files, slog.New(slog.DiscardHandler))
			if !errors.Is(err, tt.err) || !strings.Contains(err.Error(), tt.named) {
				t.Errorf("error %v, want %v that names %s", err, tt.err, tt.named)
			}
		})
	}
}
