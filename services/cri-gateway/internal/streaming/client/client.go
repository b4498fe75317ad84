package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/gorilla/websocket"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
)

// Streams tells which streams a client opens.
type Streams struct {
	Stdin, Stdout, Stderr, Terminal bool
}

// Limits are the times that a client has.
type Limits struct {
	// Idle ends sessions over which nothing was sent for so long; 0 means never.
	Idle time.Duration
	// Creation ends SPDY sessions whose client does not open its streams.
	Creation time.Duration
}

// Client is the client's end of an exec or attach session, whatever protocol it speaks.
type Client struct {
	// Stdin is nil if the client has none. Its reads end when the client closes it,
	// or when the session is closed.
	Stdin io.Reader
	// Stdout and Stderr are nil if the client does not want them.
	Stdout, Stderr io.Writer

	sizes *sizes
	// structured tells that the outcome is written as a status object; older
	// protocols take the plain text of a failure.
	structured bool
	outcome    io.Writer
	// readers are the goroutines that read from the client; they end with close.
	readers *sync.WaitGroup
	// close ends the connection and waits for readers.
	close func()
}

// Open upgrades a request to SPDY or WebSocket and waits until the client has opened its
// streams. ctx is the session's. Mistakes of the client are answered with an HTTP error. The
// caller owes a Close.
func Open(ctx context.Context, w http.ResponseWriter, r *http.Request, want Streams, limits Limits) (*Client, error) {
	if websocket.IsWebSocketUpgrade(r) {
		return openWebSocket(ctx, w, r, want, limits)
	}
	return openSPDY(ctx, w, r, want, limits)
}

// Sizes gives the latest size of the client's terminal that was not taken yet.
func (c *Client) Sizes() <-chan *containerv1.TerminalSize { return c.sizes.ready }

// Go runs what reads from the client, for which Close waits.
func (c *Client) Go(read func()) { c.readers.Go(read) }

// Close ends the connection, and returns when nothing reads from it any more.
func (c *Client) Close() { c.close() }

// status is the part of a Kubernetes status object that clients read.
type status struct {
	Status  string         `json:"status,omitempty"`
	Message string         `json:"message,omitempty"`
	Reason  string         `json:"reason,omitempty"`
	Details *statusDetails `json:"details,omitempty"`
	Code    int32          `json:"code,omitempty"`
}

type statusDetails struct {
	Causes []statusCause `json:"causes,omitempty"`
}

type statusCause struct {
	Type    string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
}

// Report tells the client how the session ended: an utilexec.ExitError is the exit code of its
// process, nil stands for 0.
func (c *Client) Report(err error) error {
	st := statusOf(err)
	if !c.structured {
		if err == nil {
			return nil
		}
		_, err := io.WriteString(c.outcome, st.Message)
		return err
	}
	text, err := json.Marshal(st)
	if err != nil {
		return err
	}
	_, err = c.outcome.Write(text)
	return err
}

func statusOf(err error) status {
	if err == nil {
		return status{Status: "Success"}
	}
	var exit utilexec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return status{
			Status:  "Failure",
			Reason:  remotecommand.NonZeroExitCodeReason,
			Message: fmt.Sprintf("command terminated with non-zero exit code: %v", exit),
			Details: &statusDetails{Causes: []statusCause{{
				Type: remotecommand.ExitCodeCauseType, Message: strconv.Itoa(exit.ExitStatus()),
			}}},
		}
	}
	return status{
		Status:  "Failure",
		Reason:  "InternalError",
		Message: fmt.Sprintf("Internal error occurred: %v", err),
		Code:    http.StatusInternalServerError,
	}
}

// sizes passes terminal sizes on. A new size replaces one that nobody has taken yet, so
// that the giver never waits.
type sizes struct {
	// ready holds the size to take next, if any.
	ready chan *containerv1.TerminalSize

	// mu serialises givers.
	mu sync.Mutex
}

func newSizes() *sizes { return &sizes{ready: make(chan *containerv1.TerminalSize, 1)} }

// give offers a size as a client wrote it. What makes no sense is ignored.
func (s *sizes) give(text []byte) {
	var size remotecommand.TerminalSize
	if json.Unmarshal(text, &size) == nil {
		s.offer(size)
	}
}

func (s *sizes) offer(size remotecommand.TerminalSize) {
	if size.Width == 0 || size.Height == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.ready:
	default:
	}
	s.ready <- &containerv1.TerminalSize{Width: uint32(size.Width), Height: uint32(size.Height)}
}

// readFrom takes sizes off a stream of JSON objects until it ends. After something that
// is no JSON it starts anew with the next piece that comes in.
func (s *sizes) readFrom(stream io.Reader) {
	decoder := json.NewDecoder(stream)
	for {
		var size remotecommand.TerminalSize
		err := decoder.Decode(&size)
		var syntax *json.SyntaxError
		var kind *json.UnmarshalTypeError
		switch {
		case err == nil:
			s.offer(size)
		case errors.As(err, &kind):
		case errors.As(err, &syntax):
			decoder = json.NewDecoder(stream)
		default:
			return
		}
	}
}
