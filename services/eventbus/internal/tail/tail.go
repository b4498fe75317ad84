// Package tail prints events as they come, for people and for scripts.
//
// It is an ordinary consumer without a place of its own in the stream: it disturbs no
// other reader, waits for a bus that is not there, and goes on after the bus restarted.
package tail

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

// Options say what is printed. Without All and FromSeq only new events are.
type Options struct {
	Client events.ClientConfig
	// FromSeq is the sequence of the first event; zero means unset.
	FromSeq uint64
	// All begins with the oldest event.
	All bool
	// JSON prints one object a line.
	JSON bool
	// Topics are the wanted ones; empty means all.
	Topics []string
	// Count ends the printing after that many events; zero means never.
	Count int
}

// Run prints to out until ctx is done, the count is reached, or out cannot be written;
// the last is the only error.
func Run(ctx context.Context, opts Options, tel *telemetry.Telemetry, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p := &printer{opts: opts, out: out, stop: cancel}
	want := events.ConsumerConfig{
		Topics: opts.Topics, StartSeq: opts.FromSeq, AllNodes: true, New: !opts.All && opts.FromSeq == 0,
	}
	if err := events.Consume(ctx, opts.Client, tel, want, p.handle); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// errDone keeps back what comes after the end.
var errDone = errors.New("nothing more is printed")

type printer struct {
	opts Options
	out  io.Writer
	stop context.CancelFunc

	// mu guards the fields below.
	mu      sync.Mutex
	printed int
	last    uint64
	err     error
}

func (p *printer) handle(_ context.Context, d events.Delivery) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil || p.full() {
		return errDone
	}
	// A message that the bus delivers a second time is printed once. A new stream, after
	// the bus lost its store, has lower numbers, but those are first deliveries.
	if d.Attempt > 1 && d.Sequence <= p.last {
		return nil
	}
	line, err := p.line(d)
	if err == nil {
		_, err = p.out.Write(append(line, '\n'))
	}
	if err != nil {
		p.err = fmt.Errorf("print event: %w", err)
		p.stop()
		return errDone
	}
	p.printed++
	p.last = d.Sequence
	if p.full() {
		p.stop()
	}
	return nil
}

func (p *printer) full() bool { return p.opts.Count > 0 && p.printed >= p.opts.Count }

func (p *printer) line(d events.Delivery) ([]byte, error) {
	if p.opts.JSON {
		return jsonLine(d)
	}
	return humanLine(d), nil
}
