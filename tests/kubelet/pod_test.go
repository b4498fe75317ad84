//go:build kubelet

package kubelet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const namespace = "default"

// story is a subtest's view of a node: its pods go with it.
type story struct {
	*node

	t *testing.T
}

func (n *node) story(t *testing.T) *story { return &story{node: n, t: t} }

// stories are told side by side, as subtests.
func (n *node) stories(t *testing.T, all map[string]func(*story)) {
	t.Helper()
	for name, tell := range all {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tell(n.story(t))
		})
	}
}

// shell is a container that runs a script.
func shell(name, script string) corev1.Container {
	return corev1.Container{Name: name, Image: busybox, Command: []string{"sh", "-c", script}, ImagePullPolicy: corev1.PullIfNotPresent}
}

// forever is a script that ends at once when it is told to.
const forever = "trap 'exit 0' TERM; sleep 100000 & wait"

// pod is a pod of these containers that ends quickly when it is told to.
func pod(name string, containers ...corev1.Container) *corev1.Pod {
	grace := int64(5)
	return &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace, Labels: map[string]string{"story": name}},
		Spec:       corev1.PodSpec{Containers: containers, TerminationGracePeriodSeconds: &grace},
	}
}

// podName is the name that kubelet gives to a static pod.
func podName(name string) string { return name + "-" + nodeName }

// write puts a pod's file in place of the one before, in one step, without taking it away later.
func (n *node) write(p *corev1.Pod) error {
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	// Files that begin with a dot are none of kubelet's.
	draft := n.Path("manifests", "."+p.Name)
	if err := os.WriteFile(draft, text, 0o644); err != nil {
		return err
	}
	return os.Rename(draft, n.Path("manifests", p.Name+".json"))
}

// remove takes a pod's file away and waits until kubelet has ended the pod.
func (s *story) remove(name string) {
	s.t.Helper()
	if err := os.Remove(s.Path("manifests", name+".json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.t.Error(err)
	}
	// Kubelet forgets the pod before it has ended.
	ctx := context.WithoutCancel(s.t.Context())
	eventually(s.t, "end of pod "+name, func() error {
		if _, err := s.find(name); err == nil {
			return errors.New("kubelet has it")
		} else if !errors.Is(err, errNoPod) {
			return err
		}
		answer, err := s.CRI.ListPodSandbox(ctx, &criv1.ListPodSandboxRequest{Filter: &criv1.PodSandboxFilter{
			LabelSelector: map[string]string{"io.kubernetes.pod.name": podName(name)},
			State:         &criv1.PodSandboxStateValue{State: criv1.PodSandboxState_SANDBOX_READY},
		}})
		if err == nil && len(answer.GetItems()) > 0 {
			err = errors.New("it is ready")
		}
		return err
	})
}

// run writes a pod's file; at the end of the story the pod is taken away.
func (s *story) run(p *corev1.Pod) {
	s.t.Helper()
	must(s.t, s.write(p))
	s.t.Cleanup(func() {
		if s.t.Failed() {
			found, err := s.find(p.Name)
			text, _ := json.MarshalIndent(found.Status, "", " ")
			fmt.Fprintf(s.t.Output(), "pod %s: %v\n%s\n", p.Name, err, text)
		}
		s.remove(p.Name)
	})
}

// runReady runs a pod and waits until it is ready.
func (s *story) runReady(p *corev1.Pod) corev1.Pod {
	s.t.Helper()
	s.run(p)
	return s.wait(p.Name, ready)
}

var errNoPod = errors.New("kubelet does not know the pod")

// find is what kubelet says of a pod.
func (s *story) find(name string) (corev1.Pod, error) {
	pods, err := s.pods(context.WithoutCancel(s.t.Context()))
	if err != nil {
		return corev1.Pod{}, err
	}
	for _, p := range pods {
		if p.Name == podName(name) {
			return p, nil
		}
	}
	return corev1.Pod{}, errNoPod
}

// wait waits until a pod is as a check wants it.
func (s *story) wait(name string, check func(p corev1.Pod) error) corev1.Pod {
	s.t.Helper()
	var found corev1.Pod
	eventually(s.t, "pod "+name, func() error {
		var err error
		found, err = s.find(name)
		if err != nil {
			return err
		}
		return check(found)
	})
	return found
}

// ready wants a pod that runs and is ready.
func ready(p corev1.Pod) error {
	if p.Status.Phase != corev1.PodRunning {
		return fmt.Errorf("phase is %s: %s", p.Status.Phase, p.Status.Message)
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return nil
		}
	}
	return errors.New("not ready")
}

// status is that of a container of whichever kind.
func status(p corev1.Pod, name string) corev1.ContainerStatus {
	for _, list := range [][]corev1.ContainerStatus{p.Status.ContainerStatuses, p.Status.InitContainerStatuses, p.Status.EphemeralContainerStatuses} {
		for _, c := range list {
			if c.Name == name {
				return c
			}
		}
	}
	return corev1.ContainerStatus{}
}

// terminated wants a container that has ended, now or before its restart, with a reason and a code.
func terminated(name, reason string, code int32) func(corev1.Pod) error {
	return func(p corev1.Pod) error {
		c := status(p, name)
		for _, state := range []*corev1.ContainerStateTerminated{c.State.Terminated, c.LastTerminationState.Terminated} {
			if state == nil {
				continue
			}
			if state.Reason != reason || state.ExitCode != code {
				return fmt.Errorf("container %s ended with %s, %d, want %s, %d", name, state.Reason, state.ExitCode, reason, code)
			}
			return nil
		}
		return fmt.Errorf("container %s has not ended", name)
	}
}

// waiting wants a container that waits for a reason, with words in its message.
func waiting(name, reason, words string) func(corev1.Pod) error {
	return func(p corev1.Pod) error {
		c := status(p, name)
		if c.State.Waiting == nil {
			return fmt.Errorf("container %s does not wait: %+v", name, c.State)
		}
		if c.State.Waiting.Reason != reason || !strings.Contains(c.State.Waiting.Message, words) {
			return fmt.Errorf("container %s waits because of %s: %s, want %s: %s", name, c.State.Waiting.Reason, c.State.Waiting.Message, reason, words)
		}
		return nil
	}
}

// do runs a command in a container by kubelet's /run and gives what it wrote.
func (s *story) do(name, container string, command ...string) string {
	s.t.Helper()
	query := url.Values{"cmd": {strings.Join(command, " ")}}
	out, err := s.ask(s.t.Context(), http.MethodPost, fmt.Sprintf("/run/%s/%s/%s?%s", namespace, podName(name), container, query.Encode()))
	if err != nil {
		s.t.Fatalf("run %q in %s/%s: %v", command, name, container, err)
	}
	return out
}

// logs is what a container has logged, as kubelet tells it.
func (s *story) logs(name, container, query string) (string, error) {
	return s.get(fmt.Sprintf("/containerLogs/%s/%s/%s?%s", namespace, podName(name), container, query))
}

// wantLogs waits until a container has logged exactly this.
func (s *story) wantLogs(name, container, query, want string) {
	s.t.Helper()
	eventually(s.t, "logs of "+name+"/"+container, func() error {
		got, err := s.logs(name, container, query)
		if err == nil && got != want {
			err = fmt.Errorf("are %q, want %q", got, want)
		}
		return err
	})
}
