//go:build kubelet

package kubelet

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Probes and hooks reach the container, and what they decide is done.
func TestProbesAndHooks(t *testing.T) { //nolint:tparallel // Nodes take turns, since a kubelet has ports.
	n := start(t, options{expected: []string{"PostStartHook", "PreStopHook"}})
	n.stories(t, map[string]func(*story){
		"readiness": readiness, "liveness": liveness, "startup": startup, "hooks": hooks, "hook-fails": hookFails, "web-hook": webHook,
	})
}

// probe is one that asks each second, and believes the first answer, however long that takes.
func probe(handler corev1.ProbeHandler) *corev1.Probe {
	return &corev1.Probe{ProbeHandler: handler, PeriodSeconds: 1, FailureThreshold: 1, TimeoutSeconds: 60}
}

func readiness(s *story) {
	web := func(name, port string) corev1.Container {
		return shell(name, "mkdir /www; echo ok >/www/ok; exec busybox httpd -f -p "+port+" -h /www")
	}
	byExec, byHTTP, byTCP := shell("exec", "touch /ready; "+forever), web("http", "8080"), web("tcp", "8081")
	byExec.ReadinessProbe = probe(execHandler("cat", "/ready"))
	byHTTP.ReadinessProbe = probe(corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/ok", Port: intstr.FromInt32(8080)}})
	byTCP.ReadinessProbe = probe(corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(8081)}})
	s.runReady(pod("readiness", byExec, byHTTP, byTCP))
	for _, container := range []string{"exec", "http", "tcp"} {
		command := map[string]string{"exec": "rm /ready", "http": "rm /www/ok", "tcp": "kill -STOP 1; killall httpd; true"}[container]
		if container == "tcp" {
			continue // a server that is gone ends its container: see liveness
		}
		s.script("readiness", container, command)
		s.wait("readiness", func(p corev1.Pod) error {
			if status(p, container).Ready {
				return fmt.Errorf("container %s is ready", container)
			}
			if ready(p) == nil {
				return errors.New("the pod is ready")
			}
			return nil
		})
		s.script("readiness", container, map[string]string{"exec": "touch /ready", "http": "echo ok >/www/ok"}[container])
		p := s.wait("readiness", ready)
		if got := status(p, container).RestartCount; got != 0 {
			s.t.Errorf("container %s was started again %d times", container, got)
		}
	}
}

func liveness(s *story) {
	main := shell("main", "echo life; rm -f /dead; "+forever)
	main.LivenessProbe = probe(execHandler("test", "!", "-e", "/dead"))
	other := shell("other", forever)
	s.runReady(pod("liveness", main, other))
	before := status(s.wait("liveness", ready), "main").ContainerID
	s.script("liveness", "main", "echo first; echo first life >/proc/1/fd/1; touch /dead")
	after := s.wait("liveness", func(p corev1.Pod) error {
		if got := status(p, "main").RestartCount; got != 1 {
			return fmt.Errorf("restarted %d times", got)
		}
		return ready(p)
	})
	if c := status(after, "main"); c.ContainerID == before || c.LastTerminationState.Terminated == nil || c.LastTerminationState.Terminated.ContainerID != before {
		s.t.Errorf("after the restart the container is %+v", c)
	}
	if got := status(after, "other").RestartCount; got != 0 {
		s.t.Errorf("the other container was started again %d times", got)
	}
	s.wantLogs("liveness", "main", "previous=true", "life\nfirst life\n")
	s.wantLogs("liveness", "main", "", "life\n")
}

// A startup probe that does not succeed in time ends the container, and holds up the others' probes until it does.
func startup(s *story) {
	main := shell("main", "sleep 3; touch /up; "+forever)
	main.StartupProbe = &corev1.Probe{ProbeHandler: execHandler("cat", "/up"), PeriodSeconds: 1, FailureThreshold: 120}
	main.LivenessProbe = probe(execHandler("cat", "/up"))
	got := s.runReady(pod("startup", main))
	if c := status(got, "main"); c.RestartCount != 0 || c.Started == nil || !*c.Started {
		s.t.Errorf("the container is %+v", c)
	}
}

func hooks(s *story) {
	folder := s.Path("hooks")
	must(s.t, os.MkdirAll(folder, 0o777))
	main := shell("main", "trap 'echo stopped >>/common/notes; exit 0' TERM; sleep 100000 & wait")
	main.Lifecycle = &corev1.Lifecycle{
		PostStart: &corev1.LifecycleHandler{Exec: execHandler("sh", "-c", "echo started >>/common/notes").Exec},
		PreStop:   &corev1.LifecycleHandler{Exec: execHandler("sh", "-c", "echo stopping >>/common/notes; sleep 1").Exec},
	}
	sleeper := shell("sleeper", "trap 'test -s /common/notes && grep -q stopped /common/notes && echo slept >>/common/notes; exit 0' TERM; sleep 100000 & wait")
	sleeper.Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 4}}}
	p := pod("hooks", main, sleeper)
	grace := int64(30)
	p.Spec.TerminationGracePeriodSeconds = &grace
	p.Spec.Volumes = []corev1.Volume{hostFolder("work", folder)}
	everywhere(p, corev1.VolumeMount{Name: "work", MountPath: "/common"})
	s.runReady(p)
	s.remove("hooks")
	want := "started\nstopping\nstopped\nslept\n"
	if notes, err := os.ReadFile(folder + "/notes"); err != nil || string(notes) != want {
		s.t.Errorf("notes are %q, %v, want %q", notes, err, want)
	}
}

func hookFails(s *story) {
	main := shell("main", forever)
	main.Lifecycle = &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Exec: execHandler("sh", "-c", "echo hook words >&2; exit 6").Exec}}
	p := pod("hook-fails", main)
	p.Spec.RestartPolicy = corev1.RestartPolicyNever
	s.run(p)
	s.wait("hook-fails", terminated("main", "Completed", 0))
}

// A hook over HTTP reaches the pod's address.
func webHook(s *story) {
	main := corev1.Container{Name: "main", Image: "registry.k8s.io/e2e-test-images/nginx:1.14-2", ImagePullPolicy: corev1.PullIfNotPresent}
	hook := &corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/", Port: intstr.FromInt32(8090)}}
	main.Lifecycle = &corev1.Lifecycle{PreStop: hook}
	folder := s.Path("web-hook")
	must(s.t, os.MkdirAll(folder, 0o777))
	listener := shell("listener", "nc -l -p 8090 -e sh -c 'read line; echo \"$line\" >/common/request; printf \"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n\"'; "+forever)
	p := pod("web-hook", main, listener)
	grace := int64(60)
	p.Spec.TerminationGracePeriodSeconds = &grace
	p.Spec.Volumes = []corev1.Volume{hostFolder("work", folder)}
	everywhere(p, corev1.VolumeMount{Name: "work", MountPath: "/common"})
	s.runReady(p)
	s.remove("web-hook")
	if request, err := os.ReadFile(folder + "/request"); err != nil || !strings.HasPrefix(string(request), "GET / HTTP/1.1") {
		s.t.Errorf("the request of the hook was %q, %v", request, err)
	}
}
