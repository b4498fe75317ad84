// Package publish sends the events of a shim to the runtime that started it.
//
// Publishing never blocks. Events are sent one after the other in the order in which they
// were published, each until the runtime has taken it, however long the runtime is away. What
// waits is bounded: beyond the bound the oldest events are dropped, those about the ends of
// processes last. The package does not know what events mean.
package publish

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	eventsapi "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crisp-cri/crisp/services/internal/pause"
)

const (
	// maxWaiting is how many events may wait.
	maxWaiting = 1024
	// sendTime bounds one attempt to send an event.
	sendTime = 5 * time.Second
	// refusals is how often an event that the runtime refuses is sent.
	refusals = 5
	// idleTime is how long a connection is kept without use.
	idleTime   = 5 * time.Second
	retryFirst = 50 * time.Millisecond
	retryMost  = 5 * time.Second
)

// Publisher sends events. It is safe for concurrent use.
type Publisher struct {
	address, namespace string
	log                *slog.Logger
	wake               chan struct{}

	// mu guards the rest.
	mu      sync.Mutex
	queue   []*types.Envelope
	dropped int
	empty   chan struct{} // closed while nothing waits
}

// New returns a publisher to the ttrpc event service at a path of a socket. With an empty
// path events are thrown away.
func New(address, namespace string, log *slog.Logger) *Publisher {
	p := &Publisher{
		address:   strings.TrimPrefix(address, "unix://"),
		namespace: namespace,
		log:       log,
		wake:      make(chan struct{}, 1),
		empty:     make(chan struct{}),
	}
	close(p.empty)
	return p
}

// Publish lets an event be sent.
func (p *Publisher) Publish(topic string, event proto.Message) {
	if p.address == "" {
		return
	}
	data, err := proto.Marshal(event)
	if err != nil {
		p.log.Error("event not encoded", slog.String("topic", topic), slog.String("error", err.Error()))
		return
	}
	e := &types.Envelope{
		Timestamp: timestamppb.Now(), Namespace: p.namespace, Topic: topic,
		Event: &anypb.Any{TypeUrl: string(event.ProtoReflect().Descriptor().FullName()), Value: data},
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) == 0 {
		p.empty = make(chan struct{})
	}
	if p.queue = append(p.queue, e); len(p.queue) > maxWaiting {
		p.drop()
	}
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// drop drops the least important event; mu is held.
func (p *Publisher) drop() {
	victim := 0
	for i, e := range p.queue {
		if !dear(e.GetTopic()) {
			victim = i
			break
		}
	}
	p.queue = append(p.queue[:victim], p.queue[victim+1:]...)
	p.dropped++
}

// dear says whether a topic is about the end of a process.
func dear(topic string) bool {
	switch topic {
	case "/tasks/exit", "/tasks/oom", "/tasks/delete":
		return true
	default:
		return false
	}
}

// Run sends events until ctx ends.
func (p *Publisher) Run(ctx context.Context) {
	var c conn
	defer c.close()
	for {
		e := p.next()
		if e == nil {
			if !p.idle(ctx, &c) {
				return
			}
			continue
		}
		if !p.send(ctx, &c, e) {
			return
		}
		p.done(e)
	}
}

// idle waits for an event, and gives the connection up if none comes for a while.
func (p *Publisher) idle(ctx context.Context, c *conn) bool {
	var tired <-chan time.Time
	if c.client != nil {
		t := time.NewTimer(idleTime)
		defer t.Stop()
		tired = t.C
	}
	select {
	case <-p.wake:
	case <-tired:
		c.close()
	case <-ctx.Done():
		return false
	}
	return true
}

// next is the event whose turn it is; nil if none waits.
func (p *Publisher) next() *types.Envelope {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dropped > 0 {
		p.log.Warn("events dropped", slog.Int("count", p.dropped))
		p.dropped = 0
	}
	if len(p.queue) == 0 {
		return nil
	}
	return p.queue[0]
}

// done removes an event that was sent, if it was not dropped meanwhile.
func (p *Publisher) done(e *types.Envelope) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) > 0 && p.queue[0] == e {
		p.queue[0] = nil
		p.queue = p.queue[1:]
	}
	if len(p.queue) == 0 {
		p.queue = nil
		select {
		case <-p.empty:
		default:
			close(p.empty)
		}
	}
}

// send sends one event; false means that ctx ended.
func (p *Publisher) send(ctx context.Context, c *conn, e *types.Envelope) bool {
	refused := 0
	for delay := retryFirst; ; delay = min(2*delay, retryMost) {
		err := c.forward(ctx, p.address, e)
		if err == nil {
			return true
		}
		if !errors.Is(err, errAway) {
			if refused++; refused >= refusals {
				p.log.WarnContext(ctx, "event refused", slog.String("topic", e.GetTopic()), slog.String("error", err.Error()))
				return true
			}
		}
		c.close()
		if !pause.For(ctx, delay) {
			return false
		}
	}
}

// Flush waits until nothing waits any more, or ctx ends.
func (p *Publisher) Flush(ctx context.Context) {
	p.mu.Lock()
	empty := p.empty
	p.mu.Unlock()
	select {
	case <-empty:
	case <-ctx.Done():
	}
}

// errAway says that the runtime does not answer.
var errAway = errors.New("event service is away")

// conn is the connection to the runtime.
type conn struct{ client *ttrpc.Client }

func (c *conn) forward(ctx context.Context, address string, e *types.Envelope) error {
	ctx, cancel := context.WithTimeout(ctx, sendTime)
	defer cancel()
	if c.client == nil {
		var d net.Dialer
		nc, err := d.DialContext(ctx, "unix", address)
		if err != nil {
			return errors.Join(errAway, err)
		}
		c.client = ttrpc.NewClient(nc)
	}
	_, err := eventsapi.NewTTRPCEventsClient(c.client).Forward(ctx, &eventsapi.ForwardRequest{Envelope: e})
	if errors.Is(err, ttrpc.ErrClosed) || ctx.Err() != nil {
		return errors.Join(errAway, err)
	}
	return err
}

func (c *conn) close() {
	if c.client != nil {
		_ = c.client.Close()
		c.client = nil
	}
}
