package login

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/auth"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
)

const (
	// maxRejected is how often one request is repeated after its proof was refused.
	maxRejected = 2
	// tokenMargin is how long before its end a token is no longer used.
	tokenMargin = time.Second
	// maxToken bounds the answer of a token service, and tokenTime the wait for all of it.
	maxToken  = 1 << 20
	tokenTime = 2 * time.Minute
	// maxLife bounds how long a token is used without a new one, whatever its service says.
	maxLife = 24 * time.Hour
)

// Authorizer proves to one registry host who is asking. It implements docker.Authorizer and is
// safe for concurrent use.
type Authorizer struct {
	host   string
	scheme string
	creds  Credentials
	header http.Header  // configured headers of the host, which may be secrets
	client *http.Client // for the token service

	mu     sync.Mutex // mu guards the rest
	basic  bool
	bearer *challenge
	tokens map[string]*token // by scope
}

// token is a bearer token, or the attempt to get it until done is closed.
type token struct {
	done    chan struct{}
	value   string
	expires time.Time // zero: unknown
	err     error
}

func (t *token) usable() bool {
	select {
	case <-t.done:
	default:
		return true // about to arrive
	}
	return t.err == nil && (t.expires.IsZero() || time.Until(t.expires) > tokenMargin)
}

// NewAuthorizer returns what proves to the host, by its client, who is asking: whoever has the credentials.
func NewAuthorizer(host docker.RegistryHost, creds Credentials) *Authorizer {
	client := *host.Client
	client.Transport = brief{client.Transport}
	client.CheckRedirect = func(req *http.Request, via []*http.Request) error {
		// A redirect would carry the secret along.
		if req.URL.Host != via[0].URL.Host || len(via) > 5 {
			return http.ErrUseLastResponse
		}
		return nil
	}
	return &Authorizer{
		host: host.Host, scheme: host.Scheme, creds: creds, header: host.Header,
		client: &client, tokens: make(map[string]*token),
	}
}

// Authorize adds the proof to a request, or takes it off one that was redirected elsewhere.
func (a *Authorizer) Authorize(ctx context.Context, req *http.Request) error {
	if a.foreign(req.URL) {
		req.Header.Del("Authorization")
		req.Header.Del("Cookie")
		for name := range a.header {
			req.Header.Del(name)
		}
		return nil
	}
	if a.creds.Token != "" {
		req.Header.Set("Authorization", "Bearer "+a.creds.Token)
		return nil
	}
	a.mu.Lock()
	basic, bearer := a.basic, a.bearer
	a.mu.Unlock()
	switch {
	case bearer != nil:
		value, err := a.token(ctx, *bearer)
		if err != nil {
			return err
		}
		req.Header.Set("Authorization", "Bearer "+value)
	case basic:
		pair := a.creds.Username + ":" + a.creds.Secret
		req.Header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(pair)))
	}
	return nil
}

func (a *Authorizer) foreign(u *url.URL) bool {
	if !strings.EqualFold(u.Host, a.host) {
		return true
	}
	return u.Scheme == "http" && a.scheme == "https" && !docker.IsLocalhost(u.Host)
}

// AddResponses learns from a refusal. It returns nil if the request is worth repeating.
func (a *Authorizer) AddResponses(_ context.Context, responses []*http.Response) error {
	last := responses[len(responses)-1]
	if a.foreign(last.Request.URL) {
		return fmt.Errorf("challenge of %s: %w", last.Request.URL.Host, errdefs.ErrNotImplemented)
	}
	sent := last.Request.Header.Get("Authorization")
	rejected := 0
	for _, r := range responses {
		if r.StatusCode == http.StatusUnauthorized && r.Request.Header.Get("Authorization") != "" {
			rejected++
		}
	}
	if rejected > maxRejected || a.creds.Token != "" {
		return fmt.Errorf("%s refuses the credentials: %w", a.host, docker.ErrInvalidAuthorization)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range parseChallenges(last.Header) {
		switch {
		case c.scheme == "bearer" && c.params["realm"] != "":
			a.bearer = &c
			a.dropLocked(sent)
			return nil
		case c.scheme == "basic" && a.creds.Username != "":
			a.basic = true
		}
	}
	switch {
	case a.bearer != nil && sent != "":
		// A refusal without a usable challenge: the token may have run out.
		a.dropLocked(sent)
		return nil
	case a.basic && !strings.HasPrefix(sent, "Basic "):
		return nil
	}
	return fmt.Errorf("%s wants a login: %w", a.host, docker.ErrInvalidAuthorization)
}

// dropLocked forgets the token that was refused. Another one may have come since.
func (a *Authorizer) dropLocked(sent string) {
	for scope, t := range a.tokens {
		select {
		case <-t.done:
			if sent == "Bearer "+t.value {
				delete(a.tokens, scope)
			}
		default:
		}
	}
}

// token returns a token for the scopes of ctx and the challenge. Requests at the same time
// share one call to the token service.
func (a *Authorizer) token(ctx context.Context, c challenge) (string, error) {
	scopes := docker.GetTokenScopes(ctx, strings.Fields(c.params["scope"]))
	key := strings.Join(scopes, " ")
	a.mu.Lock()
	t := a.tokens[key]
	if t != nil && t.usable() {
		a.mu.Unlock()
		select {
		case <-t.done:
			return t.value, t.err
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
	}
	t = &token{done: make(chan struct{})}
	a.tokens[key] = t
	a.mu.Unlock()

	t.value, t.expires, t.err = a.fetchToken(ctx, c, scopes)
	close(t.done)
	return t.value, t.err
}

func (a *Authorizer) fetchToken(ctx context.Context, c challenge, scopes []string) (string, time.Time, error) {
	realm, err := url.Parse(c.params["realm"])
	if err != nil || realm.Host == "" {
		return "", time.Time{}, fmt.Errorf("%s: token service address is malformed: %w", a.host, docker.ErrInvalidAuthorization)
	}
	if realm.Scheme != "https" && a.scheme == "https" && !a.creds.empty() && !docker.IsLocalhost(realm.Host) {
		return "", time.Time{}, fmt.Errorf("%s: token service %s is not encrypted: %w", a.host, realm.Host, docker.ErrInvalidAuthorization)
	}
	opts := auth.TokenOptions{
		Realm: realm.String(), Service: c.params["service"], Scopes: scopes,
		Username: a.creds.Username, Secret: a.creds.Secret,
	}
	ctx, cancel := context.WithTimeout(ctx, tokenTime)
	defer cancel()
	value, life, err := a.requestToken(ctx, opts)
	if err != nil {
		return "", time.Time{}, fmt.Errorf("token from %s: %w", realm.Host, senseless(err))
	}
	if life <= 0 {
		return value, time.Time{}, nil
	}
	return value, time.Now().Add(time.Duration(min(life, int(maxLife/time.Second))) * time.Second), nil
}

// senseless gives an answer that is no token the kind of a service that is out of order.
func senseless(err error) error {
	if _, status := errors.AsType[remoteerrors.ErrUnexpectedStatus](err); status || !errors.Is(errdefs.Resolve(err), errdefs.ErrUnknown) {
		return err
	}
	return fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
}

// brief is a transport whose answers have few bytes: who reads a token reads it into memory.
type brief struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (b brief) RoundTrip(req *http.Request) (*http.Response, error) {
	next := b.RoundTripper
	if next == nil {
		next = http.DefaultTransport
	}
	resp, err := next.RoundTrip(req)
	if err == nil {
		resp.Body = &briefBody{resp.Body, maxToken}
	}
	return resp, err
}

// briefBody fails when it has more bytes than are left.
type briefBody struct {
	io.ReadCloser

	left int64
}

// Read implements io.Reader.
func (b *briefBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, fmt.Errorf("the answer has more than %d bytes: %w", maxToken, errdefs.ErrUnavailable)
	}
	return n, err
}

// requestToken asks in the way that most services know, then in the other one.
func (a *Authorizer) requestToken(ctx context.Context, opts auth.TokenOptions) (value string, life int, err error) {
	if opts.Username != "" || opts.Secret == "" {
		resp, err := auth.FetchToken(ctx, a.client, nil, opts)
		if err == nil {
			return resp.Token, resp.ExpiresInSeconds, nil
		}
		if opts.Secret == "" || !otherMethod(err) {
			return "", 0, err
		}
	}
	resp, err := auth.FetchTokenWithOAuth(ctx, a.client, nil, "crisp", opts)
	if err != nil {
		return "", 0, err
	}
	return resp.AccessToken, resp.ExpiresInSeconds, nil
}

// otherMethod says that a token service seems not to know the method of the request.
func otherMethod(err error) bool {
	status, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err)
	return ok && (status.StatusCode == http.StatusMethodNotAllowed || status.StatusCode == http.StatusNotFound)
}
