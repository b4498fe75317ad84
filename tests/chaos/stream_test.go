//go:build integration

package chaos

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	eventtypes "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/typeurl/v2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// stream reads the bus's stream, from where the last round ended.
type stream struct {
	system *testenv.System
	next   uint64
}

// life is what the stream told of one container, in order.
type life struct {
	topics []string
	code   uint32
}

var (
	wholeLife = []string{"/tasks/create", "/tasks/start", "/tasks/exit", "/tasks/delete"}
	// failedStart is what is told of a container whose first process never ran.
	failedStart = []string{"/tasks/exit"}
)

// startErrorCode is the exit code of such a container.
const startErrorCode = 128

// checkEvents checks that each container's life was told once and in order: of those that
// were started wholly, of the others wholly, not at all, or as a failed start.
func (r *round) checkEvents(ctx context.Context) error {
	var last uint64
	err := eventually(ctx, time.Minute, func() error {
		lives, end, err := r.events.read(ctx)
		if err != nil {
			return err
		}
		last = end
		return r.compare(lives)
	})
	if err == nil {
		r.events.next = last + 1
	}
	return err
}

func (r *round) compare(lives map[string]*life) error {
	var problems []error
	for id, p := range r.promises {
		if p.started && lives[id] == nil {
			problems = append(problems, fmt.Errorf("container %s (%s) was started and the stream holds nothing of it", id, p.name))
		}
	}
	for id, l := range lives {
		p, known := r.promises[id]
		failed := !p.started && l.code == startErrorCode && slices.Equal(l.topics, failedStart)
		if !failed && !slices.Equal(l.topics, wholeLife) {
			problems = append(problems, fmt.Errorf("events of container %s (%s) are %v", id, p.name, l.topics))
		}
		if known && p.code >= 0 && uint32(p.code) != l.code {
			problems = append(problems, fmt.Errorf("container %s (%s): exit code %d in its status, %d in its event", id, p.name, p.code, l.code))
		}
	}
	return errors.Join(problems...)
}

// read gives what the stream holds of each container, and the number of its last message.
func (s *stream) read(ctx context.Context) (lives map[string]*life, last uint64, err error) {
	key, err := nats.NkeyOptionFromSeed(s.system.BusKey("tail"))
	if err != nil {
		return nil, 0, err
	}
	conn, err := nats.Connect("nats://127.0.0.1:4222", key)
	if err != nil {
		return nil, 0, err
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return nil, 0, err
	}
	consumer, err := js.OrderedConsumer(ctx, "CRISP_EVENTS", jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: max(s.next, 1),
	})
	if err != nil {
		return nil, 0, err
	}
	// The bus forgets it only after minutes, and holds no more than a thousand.
	defer func() { err = errors.Join(err, js.DeleteConsumer(ctx, "CRISP_EVENTS", consumer.CachedInfo().Name)) }()
	info, err := consumer.Info(ctx)
	if err != nil {
		return nil, 0, err
	}
	lives, last = map[string]*life{}, max(s.next, 1)-1
	if info.NumPending == 0 {
		return lives, last, nil
	}
	batch, err := consumer.Fetch(int(info.NumPending), jetstream.FetchMaxWait(5*time.Second))
	if err != nil {
		return nil, 0, err
	}
	for message := range batch.Messages() {
		meta, err := message.Metadata()
		if err != nil {
			return nil, 0, err
		}
		last = meta.Sequence.Stream
		if err := add(lives, message.Data()); err != nil {
			return nil, 0, err
		}
	}
	return lives, last, batch.Error()
}

// add enters one message.
func add(lives map[string]*life, data []byte) error {
	var envelope types.Envelope
	if err := proto.Unmarshal(data, &envelope); err != nil {
		return err
	}
	if envelope.GetTopic() == "/crisp/gap" {
		return errors.New("the stream has a gap")
	}
	if !strings.HasPrefix(envelope.GetTopic(), "/tasks/") {
		return nil
	}
	event, err := typeurl.UnmarshalAny(envelope.GetEvent())
	if err != nil {
		return err
	}
	named, ok := event.(interface{ GetContainerID() string })
	if !ok {
		return fmt.Errorf("event %s names no container", envelope.GetTopic())
	}
	l := lives[named.GetContainerID()]
	if l == nil {
		l = &life{}
		lives[named.GetContainerID()] = l
	}
	l.topics = append(l.topics, envelope.GetTopic())
	if exit, ok := event.(*eventtypes.TaskExit); ok {
		l.code = exit.GetExitStatus()
	}
	return nil
}
