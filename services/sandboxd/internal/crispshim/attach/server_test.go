package attach

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// box is a container for tests.
type box struct {
	hub     *Hub
	drained chan struct{}
	reopen  error
	input   chan []byte
	ended   chan struct{}
}

func newBox() *box {
	return &box{hub: &Hub{}, drained: make(chan struct{}), input: make(chan []byte, 16), ended: make(chan struct{})}
}

func (b *box) Hub() *Hub                { return b.hub }
func (b *box) Drained() <-chan struct{} { return b.drained }
func (b *box) ReopenLog() error         { return b.reopen }
func (b *box) StdinEnded()              { close(b.ended) }

func (b *box) WriteStdin(p []byte, _ func() bool) error {
	b.input <- bytes.Clone(p)
	return nil
}

// serve serves the boxes by their ids and returns how to connect.
func serve(t *testing.T, boxes map[string]*box) func() net.Conn {
	t.Helper()
	dir, err := os.MkdirTemp("", "at") // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, SocketName)
	s := NewServer(path, func(id string) (Target, error) {
		if b := boxes[id]; b != nil {
			return b, nil
		}
		return nil, fmt.Errorf("container %q: %w", id, errdefs.ErrNotFound)
	}, slog.New(slog.DiscardHandler))
	for range 2 { // the second time there is nothing to do
		if err := s.Listen(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("socket after the close: %v", err)
		}
		if err := s.Listen(context.Background()); err != nil {
			t.Errorf("listen after the close: %v", err)
		}
	})
	return func() net.Conn {
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		_ = conn.SetDeadline(time.Now().Add(testkit.Patience))
		return conn
	}
}

func ask(t *testing.T, conn net.Conn, a Ask) {
	t.Helper()
	data, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	if err := WriteFrame(conn, Request, data); err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, conn net.Conn, kind Kind, payload string) {
	t.Helper()
	got, data, err := ReadFrame(conn, make([]byte, MaxPayload))
	if err != nil || got != kind || payload != "" && string(data) != payload {
		t.Fatalf("frame %c %.100q, %v, want %c %q", got, data, err, kind, payload)
	}
}

func TestAttach(t *testing.T) {
	b := newBox()
	conn := serve(t, map[string]*box{"c": b})()
	ask(t, conn, Ask{Op: OpAttach, ID: "c", Stdin: true, Stdout: true})
	expect(t, conn, Granted, "")
	b.hub.Publish(Output, []byte("out"))
	b.hub.Publish(Errors, []byte("not asked for"))
	b.hub.Publish(Output, []byte("more"))
	expect(t, conn, Output, "out")
	expect(t, conn, Output, "more")
	for _, text := range []string{"in", ""} {
		if err := WriteFrame(conn, Input, []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if got := <-b.input; string(got) != "in" {
		t.Errorf("input %q", got)
	}
	<-b.ended
	b.hub.Publish(Output, []byte("last"))
	close(b.drained)
	expect(t, conn, Output, "last")
	expect(t, conn, End, "")
	if _, _, err := ReadFrame(conn, make([]byte, 8)); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %v", err)
	}
}

// Each refusal keeps the kind of its error.
func TestRefusals(t *testing.T) {
	silent := newBox()
	silent.hub = nil
	silent.reopen = fmt.Errorf("no log: %w", errdefs.ErrFailedPrecondition)
	connect := serve(t, map[string]*box{"silent": silent})
	for _, tc := range []struct {
		ask Ask
		is  func(error) bool
	}{
		{Ask{Op: OpAttach, ID: "absent"}, errdefs.IsNotFound},
		{Ask{Op: OpAttach, ID: "silent"}, errdefs.IsFailedPrecondition},
		{Ask{Op: OpReopen, ID: "silent"}, errdefs.IsFailedPrecondition},
		{Ask{Op: "dance", ID: "silent"}, errdefs.IsNotImplemented},
	} {
		conn := connect()
		ask(t, conn, tc.ask)
		kind, data, err := ReadFrame(conn, make([]byte, MaxPayload))
		if err != nil || kind != Refused || !tc.is(DecodeError(data)) {
			t.Errorf("%+v: frame %c %q, %v", tc.ask, kind, data, err)
		}
	}
	for name, bytes := range map[string]string{
		"other kind": "i\x00\x00\x00\x01x", "no json": "q\x00\x00\x00\x01x", "too long": "q\xff\xff\xff\xff", "cut": "q\x00",
	} {
		conn := connect()
		if _, err := io.WriteString(conn, bytes); err != nil {
			t.Fatal(err)
		}
		if c, ok := conn.(*net.UnixConn); ok {
			_ = c.CloseWrite()
		}
		rest, err := io.ReadAll(conn)
		if err != nil || len(rest) > 0 && rest[0] != byte(Refused) {
			t.Errorf("%s: answer %q, %v", name, rest, err)
		}
	}
}

func TestDrainAndReopen(t *testing.T) {
	b := newBox()
	connect := serve(t, map[string]*box{"c": b})
	conn := connect()
	ask(t, conn, Ask{Op: OpReopen, ID: "c"})
	expect(t, conn, Granted, "")
	waiting, leaving := connect(), connect()
	ask(t, waiting, Ask{Op: OpDrain, ID: "c"})
	ask(t, leaving, Ask{Op: OpDrain, ID: "c"})
	_ = leaving.Close()
	_ = waiting.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if _, err := waiting.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("drained before the end: %v", err)
	}
	_ = waiting.SetReadDeadline(time.Now().Add(testkit.Patience))
	close(b.drained)
	expect(t, waiting, Granted, "")
}

// A client that does not read holds its container up for a while and is disconnected then;
// the others lose nothing.
func TestSlowClientIsDisconnected(t *testing.T) {
	b := newBox()
	connect := serve(t, map[string]*box{"c": b})
	slow, quick := connect(), connect()
	for _, conn := range []net.Conn{slow, quick} {
		ask(t, conn, Ask{Op: OpAttach, ID: "c", Stdout: true})
		expect(t, conn, Granted, "")
	}
	const pieces = 200
	chunk := bytes.Repeat([]byte("x"), MaxPayload)
	// Each piece comes when the quick one has the one before, which on a busy machine may take it a while.
	taken := make(chan struct{}, 1)
	go func() {
		for range pieces {
			b.hub.Publish(Output, chunk)
			<-taken
		}
		close(b.drained)
	}()
	for range pieces {
		expect(t, quick, Output, string(chunk))
		taken <- struct{}{}
	}
	expect(t, quick, End, "")
	all, err := io.ReadAll(slow)
	if err != nil || len(all) >= pieces*MaxPayload {
		t.Errorf("the slow client got %d bytes, %v", len(all), err)
	}
}
