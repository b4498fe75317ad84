package streaming

import (
	"context"
	"errors"
	"io"
	"time"

	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/streaming/listen"
)

// halfCloseGrace is how long a client may take to close its side of a forwarded
// connection after the pod has closed the other one.
const halfCloseGrace = 5 * time.Second

// forwarder carries the port forwarding streams of one client.
type forwarder struct {
	// ctx ends when the client is gone; the library that calls PortForward knows no
	// such context.
	ctx       context.Context //nolint:containedctx // see above
	sandboxes sandboxv1.SandboxServiceClient
	streams   gate
}

// PortForward implements portforward.PortForwarder.
func (f *forwarder) PortForward(_ context.Context, sandboxID, _ string, port int32, local io.ReadWriteCloser) error {
	if !f.streams.enter() {
		return listen.ErrGone
	}
	defer f.streams.leave()
	ctx, cancel := context.WithCancel(f.ctx)
	defer cancel()
	remote, err := f.sandboxes.PortForward(ctx) //nolint:contextcheck // the library gives none; f.ctx is the session's
	if err != nil {
		return err
	}
	target := &sandboxv1.PortForwardTarget{SandboxId: sandboxID, Port: port}
	first := &sandboxv1.PortForwardRequest{Message: &sandboxv1.PortForwardRequest_Target{Target: target}}
	if err := remote.Send(first); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		sendLocal(remote, local)
	}()
	err = receiveRemote(remote, local)
	// The pod has nothing more to say. The client is told, and has some time to end
	// its side before it is cut.
	_ = local.Close()
	f.awaitLocal(ctx, sent, err) //nolint:contextcheck // as above
	cancel()
	cut(local)
	<-sent
	return err
}

// remoteStream is the stream to sandboxd.
type remoteStream interface {
	Send(*sandboxv1.PortForwardRequest) error
	CloseSend() error
	Recv() (*sandboxv1.PortForwardResponse, error)
}

// sendLocal carries the client's bytes until the client closes its side.
func sendLocal(remote remoteStream, local io.Reader) {
	for {
		buf := make([]byte, inputChunk)
		n, err := local.Read(buf)
		if n > 0 {
			m := &sandboxv1.PortForwardRequest{Message: &sandboxv1.PortForwardRequest_Data{Data: buf[:n]}}
			if remote.Send(m) != nil {
				return // the reason is received
			}
		}
		if err != nil {
			_ = remote.CloseSend()
			return
		}
	}
}

// receiveRemote carries the pod's bytes; nil is the pod's regular end.
func receiveRemote(remote remoteStream, local io.Writer) error {
	for {
		m, err := remote.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if _, err := local.Write(m.GetData()); err != nil {
			return errors.Join(listen.ErrGone, err)
		}
	}
}

func (f *forwarder) awaitLocal(ctx context.Context, sent <-chan struct{}, failure error) {
	if failure != nil {
		return
	}
	timer := time.NewTimer(halfCloseGrace)
	defer timer.Stop()
	select {
	case <-sent:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// cut ends the reading side of a client's stream.
func cut(local io.ReadWriteCloser) {
	if stream, ok := local.(interface{ Reset() error }); ok {
		_ = stream.Reset()
	}
}
