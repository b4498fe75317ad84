package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
)

const (
	// maxRepeats is how often a request for one address is repeated during a pull.
	maxRepeats = 3
	// maxRetryAfter is the longest pause that a registry may ask for.
	maxRetryAfter = 30 * time.Second
	// firstPause doubles with each repetition.
	firstPause = 200 * time.Millisecond
)

// errStalled is the cause of a pull that was given up because no byte moved.
var errStalled = fmt.Errorf("no progress: %w", errdefs.ErrUnavailable)

// progress sees whether bytes move. Time counts only while a request is under way: waiting
// for another pull of the same layer is not a stall of this one.
type progress struct {
	begun  time.Time // the zero of last; a time of day would jump with the clock
	active atomic.Int64
	last   atomic.Int64 // nanoseconds
}

func newProgress() *progress { return &progress{begun: time.Now()} }

func (p *progress) begin() {
	p.moved()
	p.active.Add(1)
}

func (p *progress) moved() { p.last.Store(int64(time.Since(p.begun))) }

func (p *progress) end() {
	p.moved()
	p.active.Add(-1)
}

// watch cancels when requests have been under way for limit without a byte. It returns when
// ctx ends.
func (p *progress) watch(ctx context.Context, limit time.Duration, cancel context.CancelCauseFunc) {
	tick := time.NewTicker(max(limit/10, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		idle := time.Since(p.begun) - time.Duration(p.last.Load())
		if p.active.Load() > 0 && idle > limit {
			cancel(fmt.Errorf("nothing received for %s: %w", limit, errStalled))
			return
		}
	}
}

// transport repeats requests that may succeed later and reports progress.
type transport struct {
	next     http.RoundTripper
	progress *progress

	mu      sync.Mutex
	repeats map[string]int // mu guards repeats, by method, address and range
}

func newTransport(next http.RoundTripper, p *progress) *transport {
	return &transport{next: next, progress: p, repeats: make(map[string]int)}
}

// RoundTrip implements http.RoundTripper.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	t.progress.begin()
	resp, err := t.repeat(req)
	if err != nil {
		t.progress.end()
		return nil, err
	}
	resp.Body = &body{ReadCloser: resp.Body, progress: t.progress, ctx: req.Context()}
	return resp, nil
}

func (t *transport) repeat(req *http.Request) (*http.Response, error) {
	for try := 0; ; try++ {
		resp, err := t.next.RoundTrip(req)
		pause, again := t.verdict(req, resp, err, try)
		if !again {
			return resp, err
		}
		if resp != nil {
			_, _ = io.CopyN(io.Discard, resp.Body, 64<<10)
			_ = resp.Body.Close()
		}
		if err := t.pause(req.Context(), pause); err != nil {
			return nil, err
		}
		if req, err = resend(req); err != nil {
			return nil, err
		}
		if refusedHead(req, resp) {
			req.Method = http.MethodGet
		}
	}
}

// verdict says whether a request is worth repeating, and after which pause.
func (t *transport) verdict(req *http.Request, resp *http.Response, err error, try int) (time.Duration, bool) {
	if req.Context().Err() != nil || (req.Body != nil && req.GetBody == nil) {
		return 0, false
	}
	if err != nil {
		return 0, try == 0 && dropped(err) && t.claim(req)
	}
	if refusedHead(req, resp) {
		return 0, t.claim(req)
	}
	switch resp.StatusCode {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable, http.StatusRequestTimeout,
		http.StatusInternalServerError, http.StatusBadGateway, http.StatusGatewayTimeout:
	default:
		return 0, false
	}
	pause := firstPause << min(try, maxRepeats)
	if asked, ok := retryAfter(resp.Header, time.Now()); ok {
		pause = asked
	}
	if pause > maxRetryAfter {
		return 0, false
	}
	return pause, t.claim(req)
}

// claim takes one of the repetitions that an address has.
func (t *transport) claim(req *http.Request) bool {
	key := req.Method + " " + req.URL.String() + " " + req.Header.Get("Range")
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.repeats[key] >= maxRepeats {
		return false
	}
	t.repeats[key]++
	return true
}

// pause waits; the wait was asked for and does not count as a stall.
func (t *transport) pause(ctx context.Context, d time.Duration) error {
	t.progress.end()
	defer t.progress.begin()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// resend prepares a request to be sent once more.
func resend(req *http.Request) (*http.Request, error) {
	next := req.Clone(req.Context())
	if req.GetBody != nil {
		b, err := req.GetBody()
		if err != nil {
			return nil, fmt.Errorf("request to %s: %w", req.URL.Host, err)
		}
		next.Body = b
	}
	return next, nil
}

// refusedHead recognises registries that ask for a login only when HEAD is used, however
// good the proof is.
func refusedHead(req *http.Request, resp *http.Response) bool {
	return resp != nil && resp.StatusCode == http.StatusUnauthorized && req.Method == http.MethodHead &&
		req.Header.Get("Authorization") != "" && strings.Contains(req.URL.Path, "/manifests/")
}

// dropped says that a connection was lost before there was an answer.
func dropped(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// retryAfter reads how long a server asks to be left alone.
func retryAfter(h http.Header, now time.Time) (time.Duration, bool) {
	v := strings.TrimSpace(h.Get("Retry-After"))
	if v == "" {
		return 0, false
	}
	if n, err := strconv.Atoi(v); err == nil {
		return time.Duration(min(max(n, 0), math.MaxInt64/int(time.Second))) * time.Second, true
	}
	if at, err := http.ParseTime(v); err == nil {
		return max(at.Sub(now), 0), true
	}
	return 0, false
}

// body reports progress, and turns lost connections into the error on which readers resume.
type body struct {
	io.ReadCloser
	progress *progress
	ctx      context.Context //nolint:containedctx // of the request that the body belongs to
	once     sync.Once
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		b.progress.moved()
	}
	if err != nil && !errors.Is(err, io.EOF) && b.ctx.Err() == nil {
		if _, isNet := errors.AsType[net.Error](err); isNet || dropped(err) {
			err = io.ErrUnexpectedEOF
		}
	}
	if err != nil && b.ctx.Err() != nil {
		err = context.Cause(b.ctx)
	}
	return n, err
}

// Close ends the transfer.
func (b *body) Close() error {
	b.once.Do(b.progress.end)
	return b.ReadCloser.Close()
}
