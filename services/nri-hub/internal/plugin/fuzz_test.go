package plugin

import (
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// anyone takes every plugin and asks it once.
type anyone struct{}

func (anyone) Serve(ctx context.Context, p plug.Plugin) error {
	_, err := p.Call(ctx, nri.Event_CREATE_CONTAINER, &nri.CreateContainerRequest{})
	p.Close(err)
	return nil
}

func (anyone) Update(context.Context, plug.ID, []*nri.ContainerUpdate, []*nri.ContainerEviction) ([]*nri.ContainerUpdate, error) {
	return nil, nil
}
func (anyone) Runtime() (name, version string)      { return "fuzz", "v1" }
func (anyone) RequestTimeout(plug.ID) time.Duration { return time.Second }
func (anyone) Admit(plug.Info) error                { return nil }

// frame is one message of the multiplexer.
func frame(conn uint32, payload []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, conn)
	return append(binary.BigEndian.AppendUint32(b, uint32(len(payload))), payload...)
}

// call is a ttrpc message: a request (1) or a response (2) on a stream.
func call(stream uint32, kind byte, payload []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(payload)))
	b = binary.BigEndian.AppendUint32(b, stream)
	return append(append(b, kind, 0), payload...)
}

// A plugin that sends anything at all, in any pieces, is disconnected in the end and harms
// nobody.
func FuzzConnection(f *testing.F) {
	register, err := proto.Marshal(&nri.RegisterPluginRequest{PluginName: "p", PluginIdx: "00"})
	if err != nil {
		f.Fatal(err)
	}
	// The envelope of ttrpc: service = 1, method = 2, payload = 3.
	envelope := []byte{0x0a, 28}
	envelope = append(envelope, "nri.pkg.api.v1alpha1.Runtime"...)
	envelope = append(envelope, 0x12, 14)
	envelope = append(envelope, "RegisterPlugin"...)
	envelope = append(append(envelope, 0x1a, byte(len(register))), register...)
	hello := frame(2, call(1, 1, envelope))
	answer := frame(1, call(1, 2, []byte{0x12, 2, 8, 8}))
	f.Add(append(append([]byte{}, hello...), answer...))
	f.Add(hello)
	f.Add(frame(1, []byte{1}))
	f.Add([]byte{0, 0, 0, 2, 0xff, 0xff, 0xff, 0xff})
	metrics, err := NewMetrics(prometheus.NewRegistry())
	if err != nil {
		f.Fatal(err)
	}
	s := NewServer(Config{
		RegistrationTimeout: time.Second, AnnouncedTimeout: time.Second, RequestTimeout: time.Second, NRIVersion: "v0.12.5",
	}, Parts{
		Log: slog.New(slog.DiscardHandler), Tracer: noop.NewTracerProvider().Tracer(""), Metrics: metrics, Host: anyone{},
		Peer: func(net.Conn) (Peer, error) { return Peer{}, nil },
	})
	f.Fuzz(func(t *testing.T, sent []byte) {
		ours, theirs := net.Pipe()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			s.external(t.Context(), ours)
		}()
		read := make(chan struct{})
		go func() {
			defer close(read)
			_, _ = io.Copy(io.Discard, theirs)
		}()
		_, _ = theirs.Write(sent)
		_ = theirs.Close()
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			t.Fatal("the connection was not given up")
		}
		<-read
		if n := s.unregistered.Load(); n != 0 {
			t.Fatalf("%d connections count as unregistered after the end", n)
		}
	})
}
