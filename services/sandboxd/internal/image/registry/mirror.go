package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
)

var (
	// errSilent is why a request to a mirror was given up.
	errSilent = fmt.Errorf("no answer in time: %w", errdefs.ErrUnavailable)
	// errWebPage is the error of a manifest that is a page for people.
	errWebPage = fmt.Errorf("a web page in place of a manifest: %w", errdefs.ErrUnavailable)
)

// mirror is the way to one host of a registry. A host that is not the last is left for the
// next one when it stays silent, or when what it gave for a digest was wrong. It implements
// http.RoundTripper.
type mirror struct {
	host     string
	next     http.RoundTripper
	patience time.Duration // 0: the last host, which is waited for

	mu     sync.Mutex // mu guards the rest
	silent bool
	served map[string]bool // blobs and manifests that came from here, by digest
	wrong  map[string]bool // those that are not asked for here any more
}

// RoundTrip implements http.RoundTripper.
func (m *mirror) RoundTrip(req *http.Request) (*http.Response, error) {
	dgst := digestOf(origin(req))
	if err := m.usable(dgst); err != nil {
		return nil, err
	}
	resp, err := m.send(closedRange(req))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 300 {
		return resp, nil
	}
	if err := checkRange(req, resp); err != nil {
		_ = resp.Body.Close()
		return nil, fmt.Errorf("%s: %w", m.host, err)
	}
	if strings.Contains(origin(req).URL.Path, "/manifests/") {
		switch contentType(resp.Header) {
		case "text/html", "application/xhtml+xml":
			_ = resp.Body.Close()
			return nil, fmt.Errorf("%s: %w", m.host, errWebPage)
		case "text/plain":
			// The library would take the manifest for one of the first schema. What it is can be
			// seen from its content.
			resp.Header.Del("Content-Type")
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.served == nil {
		m.served = make(map[string]bool)
	}
	m.served[dgst] = true
	return resp, nil
}

func (m *mirror) usable(dgst string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.silent:
		return fmt.Errorf("mirror %s is left out: %w", m.host, errSilent)
	case m.wrong[dgst]:
		return fmt.Errorf("mirror %s is left out: it gave wrong content for %s: %w", m.host, dgst, errdefs.ErrUnavailable)
	}
	return nil
}

// send sends a request, and gives a mirror up that does not answer in time.
func (m *mirror) send(req *http.Request) (*http.Response, error) {
	if m.patience <= 0 {
		return m.next.RoundTrip(req)
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	timer := time.AfterFunc(m.patience, func() { cancel(errSilent) })
	resp, err := m.next.RoundTrip(req.WithContext(ctx))
	if !timer.Stop() && errors.Is(context.Cause(ctx), errSilent) {
		if err == nil {
			_ = resp.Body.Close()
		}
		m.giveUp()
		return nil, fmt.Errorf("mirror %s: %w", m.host, errSilent)
	}
	if err != nil {
		cancel(err)
		return nil, err
	}
	resp.Body = &patientBody{ReadCloser: resp.Body, mirror: m, ctx: ctx, cancel: cancel}
	return resp, nil
}

func (m *mirror) giveUp() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.silent = true
}

// blame says that the content of a digest was wrong, and whether the mirror had given it.
// It is not asked for it again.
func (m *mirror) blame(dgst string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.served[dgst] || m.wrong[dgst] {
		return false
	}
	if m.wrong == nil {
		m.wrong = make(map[string]bool)
	}
	m.wrong[dgst] = true
	return true
}

// blame says that the content of a digest was wrong, and whether the next host may have the
// right one.
func (s *Session) blame(dgst digest.Digest) bool {
	for _, m := range s.mirrors {
		if m.blame(dgst.String()) {
			return true
		}
	}
	return false
}

// origin returns the request that a chain of redirects began with.
func origin(req *http.Request) *http.Request {
	for req.Response != nil && req.Response.Request != nil {
		req = req.Response.Request
	}
	return req
}

// digestOf returns the digest that a request asks for, empty if it asks by tag.
func digestOf(req *http.Request) string {
	last := req.URL.Path[strings.LastIndexByte(req.URL.Path, '/')+1:]
	if d, err := digest.Parse(last); err == nil {
		return d.String()
	}
	return ""
}

// sizeKey is the key of a blob's size in the contexts of requests for it.
type sizeKey struct{}

// closedRange gives the range of a request for the rest of a blob an end. It means the same,
// and there are registries that know only ranges with an end.
func closedRange(req *http.Request) *http.Request {
	size, known := req.Context().Value(sizeKey{}).(int64)
	from, open := strings.CutSuffix(req.Header.Get("Range"), "-")
	if !known || !open {
		return req
	}
	req = req.Clone(req.Context())
	req.Header.Set("Range", from+"-"+strconv.FormatInt(size-1, 10))
	return req
}

// checkRange refuses a part of a blob that begins elsewhere than was asked for. Errors:
// ErrFailedPrecondition.
func checkRange(req *http.Request, resp *http.Response) error {
	from, _, asked := strings.Cut(strings.Replace(req.Header.Get("Range"), "=", " ", 1), "-")
	got := resp.Header.Get("Content-Range")
	if !asked || got == "" || strings.HasPrefix(got, from+"-") {
		return nil
	}
	return fmt.Errorf("answer is the range %q, not %q: %w", got, req.Header.Get("Range"), errdefs.ErrFailedPrecondition)
}

func contentType(h http.Header) string {
	kind, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	if err != nil {
		return ""
	}
	return kind
}

// patientBody gives a mirror up on which no byte moves while one is waited for. The reader
// goes on with the next host.
type patientBody struct {
	io.ReadCloser
	mirror *mirror
	ctx    context.Context //nolint:containedctx // of the request that the body belongs to
	cancel context.CancelCauseFunc
}

// Read implements io.Reader.
func (b *patientBody) Read(p []byte) (int, error) {
	timer := time.AfterFunc(b.mirror.patience, func() { b.cancel(errSilent) })
	n, err := b.ReadCloser.Read(p)
	timer.Stop()
	if err != nil && errors.Is(context.Cause(b.ctx), errSilent) {
		b.mirror.giveUp()
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// Close implements io.Closer.
func (b *patientBody) Close() error {
	defer b.cancel(context.Canceled)
	return b.ReadCloser.Close()
}
