// Package service serves the shim's API: the task service in version 3 and the sandbox
// service in version 1 of containerd, over ttrpc.
//
// It maps messages to calls of package task and errors to codes, and holds the containers of
// the pod. A sandbox needs no process of its own; it has one only if its bundle describes
// one. Shutdown of the task service ends the shim when there is nothing left in it;
// ShutdownSandbox ends it together with what is left. The package does no input and output of
// containers.
package service

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/attach"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/task"
)

// Services are the services of one shim. They are safe for concurrent use.
type Services struct {
	host task.Host
	// optionsPath is the file of the pod's runtime options, if it has any.
	optionsPath string
	// listenStreams makes the socket for attached clients.
	listenStreams func(ctx context.Context) error
	// stop ends the shim.
	stop func()

	// mu guards the rest.
	mu         sync.Mutex
	containers map[string]*task.Container // nil while being created
	sandbox    *sandbox
	stopping   bool
}

// New returns the services. The pod's runtime options are in the file at optionsPath, if there
// is one. listenStreams is called before the first container that clients
// can attach to is created, stop when the shim is to end.
func New(host task.Host, optionsPath string, listenStreams func(ctx context.Context) error, stop func()) *Services {
	return &Services{
		host: host, optionsPath: optionsPath, listenStreams: listenStreams, stop: stop, containers: map[string]*task.Container{},
	}
}

// get finds a container. It fails with ErrNotFound if there is none.
func (s *Services) get(id string) (*task.Container, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.containers[id]
	if c == nil {
		return nil, fmt.Errorf("container %q: %w", id, errdefs.ErrNotFound)
	}
	return c, nil
}

// process finds a process of a container.
func (s *Services) process(id, execID string) (*task.Process, error) {
	c, err := s.get(id)
	if err != nil {
		return nil, err
	}
	return c.Process(execID)
}

// reserve takes the id of a container that is going to be created.
func (s *Services) reserve(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		return fmt.Errorf("container %q: shim is ending: %w", id, errdefs.ErrUnavailable)
	}
	if _, taken := s.containers[id]; taken {
		return fmt.Errorf("container %q: %w", id, errdefs.ErrAlreadyExists)
	}
	s.containers[id] = nil
	return nil
}

// settle replaces a reservation by the container, or gives it up.
func (s *Services) settle(id string, c *task.Container) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c == nil {
		delete(s.containers, id)
		return
	}
	s.containers[id] = c
}

// forget removes a deleted container.
func (s *Services) forget(c *task.Container) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.containers[c.ID()] == c {
		delete(s.containers, c.ID())
	}
}

// all lists the containers.
func (s *Services) all() []*task.Container {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*task.Container, 0, len(s.containers))
	for _, c := range s.containers {
		if c != nil {
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b *task.Container) int {
		if a.ID() < b.ID() {
			return -1
		}
		return 1
	})
	return out
}

// Target finds a container for an attaching client.
func (s *Services) Target(id string) (attach.Target, error) {
	p, err := s.process(id, "")
	if err != nil {
		return nil, err
	}
	streams := p.Streams()
	if streams == nil {
		return nil, fmt.Errorf("container %q has no streams yet: %w", id, errdefs.ErrFailedPrecondition)
	}
	return streams, nil
}

// tryStop ends the shim if nothing is left in it.
func (s *Services) tryStop() {
	s.mu.Lock()
	busy := len(s.containers) > 0 || s.sandbox != nil
	if !busy {
		s.stopping = true
	}
	s.mu.Unlock()
	if !busy {
		s.stop()
	}
}

// destroyAll ends and removes all containers side by side.
func (s *Services) destroyAll(ctx context.Context) error {
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	var wg sync.WaitGroup
	all := s.all()
	errs := make([]error, len(all))
	for i, c := range all {
		wg.Go(func() {
			if errs[i] = c.Destroy(ctx); errs[i] == nil {
				s.forget(c)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
