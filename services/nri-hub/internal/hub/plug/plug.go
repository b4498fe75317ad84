// Package plug says what a plugin is to the hub: its name, what is known of it, how it is
// called and in which ways that fails.
//
// Whoever has a connection to a plugin implements Plugin; the hub's parts know it by
// nothing else. The package decides nothing.
package plug

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
)

// ErrLost says that a plugin's connection broke before it answered, or that the plugin
// did not keep to the protocol.
var ErrLost = errors.New("connection to the plugin lost")

// ErrStopping is the reason for which plugins are closed when the hub ends.
var ErrStopping = errors.New("hub is stopping")

// ErrReplaced is the reason for which a plugin is closed when a newer instance with the
// same index and name has taken over.
var ErrReplaced = errors.New("replaced by a newer instance")

// ID names a plugin. Two digits of index come first in the order of calls.
type ID struct {
	Index string `json:"index"`
	Name  string `json:"name"`
}

// String is the full name, such as "10-balloons", which owners and logs use.
func (id ID) String() string { return id.Index + "-" + id.Name }

// Matches reports whether name means this plugin; it may be given without the index.
func (id ID) Matches(name string) bool { return name == id.Name || name == id.String() }

// Compare puts plugins in the order of calls.
func (id ID) Compare(other ID) int {
	return cmp.Or(cmp.Compare(id.Index, other.Index), cmp.Compare(id.Name, other.Name))
}

// Info is what is known of a plugin after it was configured. It does not change.
type Info struct {
	ID         ID
	NRIVersion string
	Events     nri.EventMask
	Policy     *nri.FailurePolicy
	Kind       Kind
	PID        int32
	UID, GID   uint32
	Executable string // path of the program; empty if it is not known
}

// Kind is the way in which a plugin came.
type Kind string

// The kinds of plugins.
const (
	External Kind = "external" // it connected by itself
	Launched Kind = "launched" // the hub started its process
	Wasm     Kind = "wasm"     // it runs inside the hub
)

// Plugin is a registered and configured plugin. Its methods may be called concurrently.
type Plugin interface {
	Info() Info
	// Call sends the request that belongs to event and returns the answer. An error
	// that is neither ErrLost nor a context's error is the plugin's own answer.
	Call(ctx context.Context, event nri.Event, req proto.Message) (proto.Message, error)
	// Synchronize sends one part of the inventory.
	Synchronize(ctx context.Context, req *nri.SynchronizeRequest) (*nri.SynchronizeResponse, error)
	// Shutdown tells the plugin that it will be disconnected.
	Shutdown(ctx context.Context) error
	// Close disconnects the plugin; the cause goes to the log.
	Close(cause error)
	// Done is closed when the plugin is disconnected.
	Done() <-chan struct{}
}

// Inventory is a consistent snapshot of pods and containers.
type Inventory struct {
	Pods       []*nri.PodSandbox
	Containers []*nri.Container
	Ended      []string // ids of pods and containers that have ended and are not removed
}

// Error is a plugin's failure to take a request.
type Error struct {
	Plugin ID
	Event  nri.Event
	Err    error
}

// Error names the plugin and the request.
func (e *Error) Error() string {
	return fmt.Sprintf("plugin %q: %s: %v", e.Plugin, e.Event.PrettyName(), e.Err)
}

// Unwrap makes the error an errdefs.ErrAborted: the request was ended by a plugin.
func (e *Error) Unwrap() []error { return []error{errdefs.ErrAborted, e.Err} }
