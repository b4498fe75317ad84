package imagetest

import (
	"bytes"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
)

// Status answers requests whose path contains part with a status, the first times only, or
// always if times is negative.
func Status(part string, times, status int, header http.Header) Fault {
	return limited(part, times, func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
		maps.Copy(w.Header(), header)
		w.WriteHeader(status)
	})
}

// Header changes a header of answers; an empty value takes it away.
func Header(part, name, value string) Fault {
	return limited(part, -1, func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		rec := record(r, next)
		if rec.Header().Set(name, value); value == "" {
			rec.Header()[name] = nil
		}
		replay(w, rec, rec.Body.Bytes(), r)
	})
}

// Rewrite changes the bodies of answers. Lengths are those of the changed body; digests in
// headers stay.
func Rewrite(part string, change func([]byte) []byte) Fault {
	return limited(part, -1, func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		rec := record(r, next)
		body := rec.Body.Bytes()
		if r.Method == http.MethodGet {
			body = change(bytes.Clone(body))
			rec.Header().Set("Content-Length", strconv.Itoa(len(body)))
		}
		replay(w, rec, body, r)
	})
}

// Truncate closes the connection after 60 % of the body, honouring ranges.
func Truncate(part string, times int) Fault {
	return limited(part, times, func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		from, ranged := offset(r)
		plain := r.Clone(r.Context())
		plain.Header.Del("Range")
		rec := record(plain, next)
		body := rec.Body.Bytes()[min(from, rec.Body.Len()):]
		rec.Header().Set("Content-Length", strconv.Itoa(len(body)))
		if ranged {
			rec.Code = http.StatusPartialContent
		}
		replay(w, rec, body[:len(body)*6/10], r)
		panic(http.ErrAbortHandler)
	})
}

// Hangup closes the connection before there is an answer.
func Hangup(part string, times int) Fault {
	return limited(part, times, func(http.ResponseWriter, *http.Request, http.Handler) {
		panic(http.ErrAbortHandler)
	})
}

func limited(part string, times int, fault Fault) Fault {
	var seen atomic.Int64
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !strings.Contains(r.URL.Path, part) || (times >= 0 && seen.Add(1) > int64(times)) {
			next.ServeHTTP(w, r)
			return
		}
		fault(w, r, next)
	}
}

func offset(r *http.Request) (int, bool) {
	v, ok := strings.CutPrefix(r.Header.Get("Range"), "bytes=")
	from, _, _ := strings.Cut(v, "-")
	n, err := strconv.Atoi(from)
	return n, ok && err == nil
}

// Ranges answers requests for ranges as RFC 9110 has it; the registry itself knows only some
// of their forms.
func Ranges(part string) Fault {
	return limited(part, -1, func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		ServeRanges(w, r, Whole(r, next))
	})
}

// ServeRanges answers a request with the part of body that it asks for.
func ServeRanges(w http.ResponseWriter, r *http.Request, body []byte) {
	w.Header().Set("Content-Type", "application/octet-stream")
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(body))
}

// Whole returns the whole body of an answer, whatever range is asked for.
func Whole(r *http.Request, next http.Handler) []byte {
	plain := r.Clone(r.Context())
	plain.Header.Del("Range")
	return record(plain, next).Body.Bytes()
}

func record(r *http.Request, next http.Handler) *httptest.ResponseRecorder {
	rec := httptest.NewRecorder()
	next.ServeHTTP(rec, r)
	return rec
}

func replay(w http.ResponseWriter, rec *httptest.ResponseRecorder, body []byte, r *http.Request) {
	maps.Copy(w.Header(), rec.Header())
	w.WriteHeader(rec.Code)
	if r.Method != http.MethodHead {
		_, _ = w.Write(body)
	}
	if f, ok := w.(http.Flusher); ok {
		f.Flush()
	}
}

// RawLayer makes a layer of any bytes that claims to hold content of a digest.
func RawLayer(data []byte, diffID digest.Digest) v1.Layer { return rawLayer{data, diffID} }

type rawLayer struct {
	data   []byte
	diffID digest.Digest
}

func (l rawLayer) Digest() (v1.Hash, error) {
	h, _, err := v1.SHA256(bytes.NewReader(l.data))
	return h, err
}
func (l rawLayer) DiffID() (v1.Hash, error) { return v1.NewHash(l.diffID.String()) }
func (l rawLayer) Size() (int64, error)     { return int64(len(l.data)), nil }

func (l rawLayer) Compressed() (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(l.data)), nil
}
func (l rawLayer) Uncompressed() (io.ReadCloser, error) { return l.Compressed() }
func (l rawLayer) MediaType() (types.MediaType, error)  { return types.OCILayer, nil }
