// Package eventfeed reads from the bus what happened to containers and sandboxes and passes
// it on: ends, so that plugins hear of containers that end by themselves, and all changes,
// for those who follow CRI's container events.
//
// The two are read independently: a plugin that does not answer holds up no event.
//
// The place in the stream is kept by the bus: what was published while the gateway was
// down is read afterwards. An event may come twice; whoever is told must bear that.
// Without a bus the package is not used; sandboxd's own answers carry every end that
// somebody asked for.
package eventfeed

import (
	"context"
	"fmt"
	"log/slog"

	taskevents "github.com/containerd/containerd/api/events"
	"github.com/containerd/typeurl/v2"

	"github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

const (
	durable   = "cri-gateway-exits"
	exitTopic = "/tasks/exit"
)

// Sink is told of ends.
type Sink interface {
	// ContainerExited is called for each container that has ended; an error makes the
	// event come again later.
	ContainerExited(ctx context.Context, containerID string) error
}

// Run reads exits until ctx ends. A place in the stream that does not exist yet begins
// with the newest event: what happened before is in the inventory that plugins get.
func Run(ctx context.Context, cfg events.ClientConfig, tel *telemetry.Telemetry, sink Sink) error {
	want := events.ConsumerConfig{Durable: durable, Topics: []string{exitTopic}, New: true}
	return events.Consume(ctx, cfg, tel, want, func(ctx context.Context, d events.Delivery) error {
		return handle(ctx, tel.Log, d, sink)
	})
}

func handle(ctx context.Context, log *slog.Logger, d events.Delivery, sink Sink) error {
	var exit taskevents.TaskExit
	if err := typeurl.UnmarshalTo(d.Envelope.GetEvent(), &exit); err != nil {
		// It would be no better the next time.
		log.WarnContext(ctx, "exit event not understood", slog.Uint64(telemetry.KeySequence, d.Sequence),
			slog.Any(telemetry.KeyError, err))
		return nil
	}
	if exit.GetID() != exit.GetContainerID() {
		return nil // a command that was run in the container
	}
	if err := sink.ContainerExited(ctx, exit.GetContainerID()); err != nil {
		return fmt.Errorf("exit of container %s: %w", exit.GetContainerID(), err)
	}
	return nil
}
