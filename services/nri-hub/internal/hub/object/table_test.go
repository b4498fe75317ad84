package object

import (
	"fmt"
	"testing"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// book is a ledger.
type book struct{ ids []string }

func (b *book) Object(pod *nri.PodSandbox, c *nri.Container) {
	b.ids = append(b.ids, Object{pod, c}.ID())
}
func (*book) Told(plug.ID, string, Stage) {}

func TestTable(t *testing.T) {
	t.Parallel()
	pod := &nri.PodSandbox{Id: "p", Namespace: "ns", Ips: []string{"10.0.0.1"}}
	c := &nri.Container{Id: "c", PodSandboxId: "p", Env: []string{"A=b"}}
	past := Past{
		Pods: map[string]*nri.PodSandbox{"old": {Id: "old"}}, Containers: map[string]*nri.Container{"oc": {Id: "oc", PodSandboxId: "old"}},
	}
	var b book
	table := NewTable(past, &b)
	if table.PodOf("oc").GetId() != "old" || table.PodOf("unknown") != nil {
		t.Error("the past is not remembered")
	}
	making := func() (ids []string) {
		for _, m := range table.UnderWay() {
			ids = append(ids, m.ID())
		}
		return ids
	}
	begin := func(e nri.Event, c *nri.Container) { table.Enroll(table.Begin(e, pod, c)) }
	begin(nri.Event_RUN_POD_SANDBOX, nil)
	if got := fmt.Sprint(making()); got != "[p]" {
		t.Errorf("under way: %v", got)
	}
	begin(nri.Event_CREATE_CONTAINER, c)
	first := table.UnderWay()
	if got := fmt.Sprint(making()); got != "[c]" || !table.IsUnderWay(first[0]) {
		t.Errorf("under way: %v", got)
	}
	begin(nri.Event_CREATE_CONTAINER, c)
	if table.IsUnderWay(first[0]) || !table.IsUnderWay(table.UnderWay()[0]) {
		t.Error("a second attempt is taken for the first")
	}
	begin(nri.Event_POST_CREATE_CONTAINER, c)
	if len(making()) > 0 {
		t.Errorf("under way: %v", making())
	}
	if o, ok := table.Get("c"); !ok || o.Pod.GetNamespace() != "ns" || len(o.Container.GetEnv()) > 0 || len(o.Pod.GetIps()) > 0 {
		t.Errorf("remembered is %v", o)
	}
	table.Learn([]Object{{Pod: pod}, {Pod: pod, Container: &nri.Container{Id: "d", PodSandboxId: "p"}}})
	if got := fmt.Sprint(b.ids); got != "[p c d]" {
		t.Errorf("the ledger has %v", got)
	}
	// What is removed is remembered for a while.
	begin(nri.Event_REMOVE_CONTAINER, c)
	if _, ok := table.Get("c"); !ok {
		t.Error("forgotten at once")
	}
	for i := range maxRemains {
		x := &nri.Container{Id: fmt.Sprint("x", i), PodSandboxId: "p"}
		begin(nri.Event_CREATE_CONTAINER, x)
		begin(nri.Event_REMOVE_CONTAINER, x)
	}
	if _, ok := table.Get("c"); ok || len(making()) > 0 {
		t.Error("never forgotten")
	}
}
