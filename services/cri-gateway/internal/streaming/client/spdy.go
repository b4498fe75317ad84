package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// spdyStream is a stream that a client has opened. replied is closed when the client has
// been told that it is accepted; writing earlier could overtake the acceptance.
type spdyStream struct {
	httpstream.Stream
	replied <-chan struct{}
}

// openSPDY upgrades a request to SPDY and waits for the client's streams.
func openSPDY(ctx context.Context, w http.ResponseWriter, r *http.Request, want Streams, limits Limits) (*Client, error) {
	protocol, err := httpstream.Handshake(r, w, remotecommand.SupportedStreamingProtocols)
	if err != nil {
		return nil, err
	}
	opened := make(chan spdyStream)
	collected := make(chan struct{})
	defer close(collected)
	upgrader := spdy.NewResponseUpgraderWithPings(pingPeriod)
	conn := upgrader.UpgradeResponse(w, r, func(stream httpstream.Stream, replied <-chan struct{}) error {
		select {
		case opened <- spdyStream{stream, replied}:
			return nil
		case <-collected:
			return errors.New("no further stream is expected")
		}
	})
	if conn == nil {
		return nil, errors.New("no upgrade to SPDY") // the client has been told why
	}
	conn.SetIdleTimeout(limits.Idle)
	streams, err := collect(ctx, opened, wantedStreams(protocol, want), limits.Creation)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return newSPDYClient(conn, protocol, streams), nil
}

// wantedStreams returns the types of the streams that the client is to open.
func wantedStreams(protocol string, want Streams) map[string]bool {
	types := map[string]bool{remotecommand.StreamTypeError: true}
	if want.Stdin {
		types[remotecommand.StreamTypeStdin] = true
	}
	if want.Stdout {
		types[remotecommand.StreamTypeStdout] = true
	}
	if want.Stderr {
		types[remotecommand.StreamTypeStderr] = true
	}
	resizable := protocol == remotecommand.StreamProtocolV3Name || protocol == remotecommand.StreamProtocolV4Name
	if want.Terminal && resizable {
		types[remotecommand.StreamTypeResize] = true
	}
	return types
}

// collect waits until the client has opened one stream of each wanted type, but no longer than limit.
func collect(
	ctx context.Context, opened <-chan spdyStream, wanted map[string]bool, limit time.Duration,
) (map[string]httpstream.Stream, error) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	streams := make(map[string]httpstream.Stream, len(wanted))
	var replies []<-chan struct{}
	for len(streams) < len(wanted) {
		select {
		case stream := <-opened:
			kind := stream.Headers().Get(remotecommand.StreamType)
			if !wanted[kind] || streams[kind] != nil {
				_ = stream.Reset()
				continue
			}
			streams[kind] = stream.Stream
			replies = append(replies, stream.replied)
		case <-timer.C:
			return nil, fmt.Errorf("client opened %d of %d streams in time", len(streams), len(wanted))
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	for _, replied := range replies {
		select {
		case <-replied:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return streams, nil
}

func newSPDYClient(conn httpstream.Connection, protocol string, streams map[string]httpstream.Stream) *Client {
	c := &Client{
		sizes:      newSizes(),
		structured: protocol == remotecommand.StreamProtocolV4Name,
		outcome:    streams[remotecommand.StreamTypeError],
		readers:    &sync.WaitGroup{},
	}
	// A nil stream must not become an interface that is not nil.
	if stream := streams[remotecommand.StreamTypeStdin]; stream != nil {
		c.Stdin = stream
	}
	if stream := streams[remotecommand.StreamTypeStdout]; stream != nil {
		c.Stdout = stream
	}
	if stream := streams[remotecommand.StreamTypeStderr]; stream != nil {
		c.Stderr = stream
	}
	if resize := streams[remotecommand.StreamTypeResize]; resize != nil {
		c.readers.Go(func() { c.sizes.readFrom(resize) })
	}
	c.close = func() {
		_ = conn.Close()
		c.readers.Wait()
	}
	return c
}
