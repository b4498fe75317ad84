// Package attach serves the streams of a shim's containers on a socket of their own.
//
// The protocol is a sequence of frames in both directions: a byte for the kind, the length
// of the payload as four bytes, big end first, and the payload, at most 32 KiB.
//
//	client  q  request in JSON, first and once: {"op":…, "id":…, "stdin":…, "stdout":…, "stderr":…}
//	shim    k  the request is granted
//	shim    x  it is refused, or the stream has failed: kind of the error, newline, text
//	client  i  input; without payload: the end of the input
//	shim    o  standard output
//	shim    e  standard error
//	shim    z  the end of the container's output
//
// Operations: "attach" connects to the streams from now on; "reopen" opens the log anew;
// "drain" is granted when all output has been written. A connection carries one request.
// Whoever closes the connection ends the request; a container never notices.
//
// What a container writes goes to every attached client. A client that does not keep up may
// hold the container up for a bounded time in all, and is disconnected then; logs are written
// before. The package keeps no output: a client gets what comes after it came.
package attach

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/containerd/errdefs"
)

// Kind is the kind of a frame.
type Kind byte

// The kinds of frames.
const (
	Request Kind = 'q'
	Granted Kind = 'k'
	Refused Kind = 'x'
	Input   Kind = 'i'
	Output  Kind = 'o'
	Errors  Kind = 'e'
	End     Kind = 'z'
)

const (
	// MaxPayload is the most that one frame carries.
	MaxPayload = 32 << 10
	headerSize = 5
)

// SocketName is the name of the socket in the folder in which a shim works.
const SocketName = "io.sock"

// Operations of a request.
const (
	OpAttach = "attach"
	OpReopen = "reopen"
	OpDrain  = "drain"
)

// Ask is what a request asks for.
type Ask struct {
	Op string `json:"op"`
	ID string `json:"id"`
	// The streams that an attaching client wants.
	Stdin  bool `json:"stdin,omitempty"`
	Stdout bool `json:"stdout,omitempty"`
	Stderr bool `json:"stderr,omitempty"`
}

// WriteFrame writes one frame with one call.
func WriteFrame(w io.Writer, kind Kind, payload []byte) error {
	frame := make([]byte, headerSize, headerSize+len(payload))
	frame[0] = byte(kind)
	binary.BigEndian.PutUint32(frame[1:], uint32(len(payload)))
	_, err := w.Write(append(frame, payload...))
	return err
}

// ReadFrame reads one frame into buf, which must hold MaxPayload bytes. It returns io.EOF at
// the end between frames.
func ReadFrame(r io.Reader, buf []byte) (Kind, []byte, error) {
	var header [headerSize]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(header[1:])
	if n > MaxPayload || int(n) > len(buf) {
		return 0, nil, fmt.Errorf("frame of %d bytes: %w", n, errdefs.ErrInvalidArgument)
	}
	if _, err := io.ReadFull(r, buf[:n]); err != nil {
		return 0, nil, errors.Join(io.ErrUnexpectedEOF, err)
	}
	return Kind(header[0]), buf[:n], nil
}

// kinds are the errors that keep their kind on the way.
var kinds = map[string]error{
	"not found":           errdefs.ErrNotFound,
	"failed precondition": errdefs.ErrFailedPrecondition,
	"invalid argument":    errdefs.ErrInvalidArgument,
	"permission denied":   errdefs.ErrPermissionDenied,
	"resource exhausted":  errdefs.ErrResourceExhausted,
	"not implemented":     errdefs.ErrNotImplemented,
}

// EncodeError is the payload that tells an error.
func EncodeError(err error) []byte {
	kind := "internal"
	for name, sentinel := range kinds {
		if errors.Is(err, sentinel) {
			kind = name
		}
	}
	text := kind + "\n" + err.Error()
	return []byte(text[:min(len(text), MaxPayload)])
}

// DecodeError reads what EncodeError wrote.
func DecodeError(payload []byte) error {
	name, text, _ := strings.Cut(string(payload), "\n")
	sentinel, ok := kinds[name]
	if !ok {
		sentinel = errdefs.ErrInternal
	}
	return told{text: text, kind: sentinel}
}

// told is an error of the other side.
type told struct {
	text string
	kind error
}

// Error implements error.
func (t told) Error() string { return t.text }

// Unwrap is the kind of the error.
func (t told) Unwrap() error { return t.kind }
