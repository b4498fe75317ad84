package tail

import (
	"strings"
	"testing"

	eventsv1 "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	"github.com/crisp-cri/crisp/services/internal/events"
)

func TestHumanLineSaysWhatTheEventIsAbout(t *testing.T) {
	for want, event := range map[string]proto.Message{
		"container=c pid=7":               &eventsv1.TaskStart{ContainerID: "c", Pid: 7},
		"container=c pid=7 exit=3":        &eventsv1.TaskExit{ContainerID: "c", ID: "c", Pid: 7, ExitStatus: 3},
		"container=c exec=e pid=7 exit=3": &eventsv1.TaskExit{ContainerID: "c", ID: "e", Pid: 7, ExitStatus: 3},
		"container=c":                     &eventsv1.TaskOOM{ContainerID: "c"},
		"container=c image=i":             &eventsv1.ContainerCreate{ID: "c", Image: "i"},
		"sandbox=s exit=0":                &eventsv1.SandboxExit{SandboxID: "s"},
		"sandbox=s":                       &eventv1.SandboxDelete{SandboxId: "s"},
		"image=i":                         &eventsv1.ImageDelete{Name: "i"},
		"image=i state=failed bytes=3/7 fetched=1/2 unpacked=0/2 error=\"no \\\"x\\\"\"": &eventv1.ImageProgress{
			Image: "i", State: eventv1.PullState_PULL_STATE_FAILED, BytesDone: 3, BytesTotal: 7, LayersFetched: 1, LayersTotal: 2, Error: `no "x"`,
		},
		"dropped=4": &eventv1.Gap{Dropped: 4},
	} {
		inner, err := typeurl.MarshalAny(event)
		if err != nil {
			t.Fatal(err)
		}
		line := string(humanLine(events.Delivery{Sequence: 12, Envelope: &types.Envelope{
			Timestamp: timestamppb.Now(), Topic: "/x/y",
			Event: &anypb.Any{TypeUrl: inner.GetTypeUrl(), Value: inner.GetValue()},
		}}))
		if !strings.HasSuffix(line, " 12 /x/y "+want) {
			t.Errorf("%T: %q, want the end %q", event, line, want)
		}
	}
}
