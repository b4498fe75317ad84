package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
)

func TestPersonalityIsTheLastElement(t *testing.T) {
	for argv0, want := range map[string]string{"/pause": "pause", "nginx: master process nginx -g daemon off;": "nginx", "/usr/sbin/httpd": "httpd"} {
		if got := personality(argv0); got != want {
			t.Errorf("personality(%q) = %q, want %q", argv0, got, want)
		}
	}
}

func TestSampleEndsAfterItsSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		if err := sample(t.Context(), []string{"-seconds", "3"}, &out); err != nil {
			t.Fatal(err)
		}
		if got := strings.Count(out.String(), "hello"); got != 3 {
			t.Errorf("%d greetings in %q, want 3", got, out.String())
		}
	})
}

func TestSampleEndsWhenTold(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out bytes.Buffer
	if err := sample(ctx, nil, &out); err != nil || !strings.Contains(out.String(), "told to stop") {
		t.Errorf("sample = %v, output %q", err, out.String())
	}
}

func TestWebServerSpeaksHTTP(t *testing.T) {
	client, server := net.Pipe()
	go answer(t.Context(), server, httpdPage, io.Discard)
	transport := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return client, nil }}
	defer transport.CloseIdleConnections()
	for range 2 { // The connection is kept.
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://web/", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		response, err := transport.RoundTrip(request)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		err = errors.Join(err, response.Body.Close())
		if err != nil || string(body) != httpdPage || response.StatusCode != http.StatusOK {
			t.Errorf("answer is %d %q, %v", response.StatusCode, body, err)
		}
	}
}
