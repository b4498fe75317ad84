package pod

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
)

// Handlers are the configured runtime handlers.
type Handlers struct {
	ByName map[string]Handler
	// Default names the one for an empty request.
	Default string
}

// Find finds a handler by its name. Errors: ErrNotFound naming those that there are.
func (h Handlers) Find(name string) (Handler, error) {
	if name == "" {
		name = h.Default
	}
	found, ok := h.ByName[name]
	if !ok {
		return Handler{}, fmt.Errorf("runtime_handler %q is not configured, known are %s: %w",
			name, strings.Join(slices.Sorted(maps.Keys(h.ByName)), ", "), errdefs.ErrNotFound)
	}
	return found, nil
}
