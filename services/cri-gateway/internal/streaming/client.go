package streaming

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
)

// client is the client's end of an exec or attach session, whatever protocol it speaks.
type client struct {
	// stdin is nil if the client has none. Its reads end when the client closes it,
	// or when the session is closed.
	stdin io.Reader
	// stdout and stderr are nil if the client does not want them.
	stdout, stderr io.Writer
	sizes          *sizes
	// structured tells that the outcome is written as a status object; older
	// protocols take the plain text of a failure.
	structured bool
	outcome    io.Writer
	// readers are the goroutines that read from the client; they end with close.
	readers *sync.WaitGroup
	// close ends the connection and waits for readers.
	close func()
}

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

// report tells the client how the session ended.
func (c *client) report(err error) error {
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
