package runtime_test

import (
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
)

// Answers that are passed on undecoded have the same fields on both sides.
func TestPassedAnswersHaveOneForm(t *testing.T) {
	for _, pair := range [][2]proto.Message{
		{&containerv1.ListContainersResponse{}, &criv1.ListContainersResponse{}},
		{&sandboxv1.ListSandboxesResponse{}, &criv1.ListPodSandboxResponse{}},
		{&containerv1.ListContainerStatsResponse{}, &criv1.ListContainerStatsResponse{}},
		{&sandboxv1.ListSandboxStatsResponse{}, &criv1.ListPodSandboxStatsResponse{}},
	} {
		ours, theirs := pair[0].ProtoReflect().Descriptor(), pair[1].ProtoReflect().Descriptor()
		if ours.Fields().Len() != theirs.Fields().Len() {
			t.Errorf("%s has %d fields, %s %d", ours.FullName(), ours.Fields().Len(), theirs.FullName(), theirs.Fields().Len())
		}
		for i := range theirs.Fields().Len() {
			want := theirs.Fields().Get(i)
			got := ours.Fields().ByNumber(want.Number())
			if got == nil || got.Kind() != want.Kind() || got.Cardinality() != want.Cardinality() || messageName(got) != messageName(want) {
				t.Errorf("%s.%s is %v in %s", theirs.FullName(), want.Name(), got, ours.FullName())
			}
		}
	}
}

func messageName(field protoreflect.FieldDescriptor) protoreflect.FullName {
	if field.Message() == nil {
		return ""
	}
	return field.Message().FullName()
}
