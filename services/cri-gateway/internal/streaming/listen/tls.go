package listen

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"

	"github.com/containerd/errdefs"
)

// TLSFiles says by which files clients are met over HTTPS, and under which terms.
type TLSFiles struct {
	// Cert and Key are the server's certificate, with its chain, and the key to it.
	Cert, Key string
	// ClientCA holds the authorities of which each client must have a certificate; empty asks
	// clients for none.
	ClientCA string
	// MinVersion is the least version that is spoken, such as tls.VersionTLS12.
	MinVersion uint16
	// CipherSuites are those of TLS 1.2 that are offered; none means Go's choice. Those of
	// TLS 1.3 are not chosen.
	CipherSuites []uint16
}

// NewTLS returns a configuration for which the files are looked at with each handshake: what
// has changed in them is in force from then on, for new connections. Files that make no sense
// together, for example because one of them is still to be replaced, leave in force what was
// before; log is told of it once. Errors: ErrInvalidArgument, or why a file cannot be read.
func NewTLS(files TLSFiles, log *slog.Logger) (*tls.Config, error) {
	first, err := files.read()
	if err != nil {
		return nil, err
	}
	config, err := files.config(first)
	if err != nil {
		return nil, err
	}
	r := &tlsReloader{files: files, log: log}
	r.current.Store(&tlsState{pem: first, config: config})
	return &tls.Config{MinVersion: files.MinVersion, GetConfigForClient: r.forClient}, nil
}

// tlsReloader keeps the configuration in step with the files.
type tlsReloader struct {
	files   TLSFiles
	log     *slog.Logger
	current atomic.Pointer[tlsState]
}

// tlsState is what was made of the files. It is never changed, only replaced.
type tlsState struct {
	pem    tlsPEM // of config
	config *tls.Config
	// problem is why a later content of the files is not in force; empty if none is.
	problem string
}

// forClient returns the configuration for a new connection. There always is one.
func (r *tlsReloader) forClient(hello *tls.ClientHelloInfo) (*tls.Config, error) {
	ctx, last := hello.Context(), r.current.Load()
	next := r.next(last)
	if next == last {
		return last.config, nil
	}
	// If another handshake was quicker, its state stays; the next one looks again.
	if r.current.CompareAndSwap(last, next) {
		switch {
		case next.problem != "":
			r.log.WarnContext(ctx, "certificates of the streaming server not reloaded", slog.String("error", next.problem))
		case next.config != last.config:
			r.log.InfoContext(ctx, "certificates of the streaming server reloaded")
		}
	}
	return next.config, nil
}

// next is last if nothing has changed.
func (r *tlsReloader) next(last *tlsState) *tlsState {
	config := last.config
	pem, err := r.files.read()
	if err == nil {
		if pem.equal(last.pem) {
			if last.problem == "" {
				return last
			}
			return &tlsState{pem: pem, config: config}
		}
		config, err = r.files.config(pem)
	}
	if err == nil {
		return &tlsState{pem: pem, config: config}
	}
	if err.Error() == last.problem {
		return last
	}
	return &tlsState{pem: last.pem, config: last.config, problem: err.Error()}
}

// tlsPEM is the content of the files.
type tlsPEM struct{ cert, key, clientCA []byte }

func (p tlsPEM) equal(q tlsPEM) bool {
	return bytes.Equal(p.cert, q.cert) && bytes.Equal(p.key, q.key) && bytes.Equal(p.clientCA, q.clientCA)
}

func (f TLSFiles) read() (p tlsPEM, err error) {
	if p.cert, err = os.ReadFile(f.Cert); err != nil {
		return p, fmt.Errorf("certificate of the streaming server: %w", err)
	}
	if p.key, err = os.ReadFile(f.Key); err != nil {
		return p, fmt.Errorf("key of the streaming server: %w", err)
	}
	if f.ClientCA == "" {
		return p, nil
	}
	if p.clientCA, err = os.ReadFile(f.ClientCA); err != nil {
		return p, fmt.Errorf("client authorities of the streaming server: %w", err)
	}
	return p, nil
}

func (f TLSFiles) config(p tlsPEM) (*tls.Config, error) {
	cert, err := tls.X509KeyPair(p.cert, p.key)
	if err != nil {
		return nil, fmt.Errorf("certificate %s with key %s: %w: %w", f.Cert, f.Key, err, errdefs.ErrInvalidArgument)
	}
	config := &tls.Config{
		Certificates: []tls.Certificate{cert},
		MinVersion:   f.MinVersion,
		CipherSuites: f.CipherSuites,
		// A client that comes back is measured by the files as they are then.
		SessionTicketsDisabled: true,
	}
	if f.ClientCA == "" {
		return config, nil
	}
	config.ClientAuth = tls.RequireAndVerifyClientCert
	config.ClientCAs = x509.NewCertPool()
	if !config.ClientCAs.AppendCertsFromPEM(p.clientCA) {
		return nil, fmt.Errorf("client authorities %s: no certificate in it: %w", f.ClientCA, errdefs.ErrInvalidArgument)
	}
	return config, nil
}
