//go:build kubelet

package kubelet

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// How containers end, and why others do not start, is told in kubelet's words.
func TestReasons(t *testing.T) { //nolint:tparallel // Nodes take turns, since a kubelet has ports.
	n := start(t, options{expected: []string{
		"no-such-image", "NO-Image", "/no/such/program", "config.working_dir",
	}})
	never := func(p *corev1.Pod) *corev1.Pod {
		p.Spec.RestartPolicy = corev1.RestartPolicyNever
		return p
	}
	n.stories(t, map[string]func(*story){
		"completed": func(s *story) {
			s.run(never(pod("completed", shell("main", "echo bye"))))
			got := s.wait("completed", terminated("main", "Completed", 0))
			s.wantPhase(got, corev1.PodSucceeded)
		},
		"error": func(s *story) {
			s.run(never(pod("error", shell("main", "echo oh; exit 7"))))
			got := s.wait("error", terminated("main", "Error", 7))
			s.wantPhase(got, corev1.PodFailed)
		},
		"signal": func(s *story) {
			// The first process of a namespace cannot kill itself: with a shared one it is another.
			yes := true
			// Kubelet makes one dollar of two.
			p := never(pod("signalled", shell("main", "kill -KILL $$$$")))
			p.Spec.ShareProcessNamespace = &yes
			s.run(p)
			s.wait("signalled", terminated("main", "Error", 137))
		},
		"oom": func(s *story) {
			p := never(pod("oom", shell("main", "x=x; while true; do x=$x$x; done")))
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"memory": resource.MustParse("24Mi")}
			s.run(p)
			s.wait("oom", terminated("main", "OOMKilled", 137))
		},
		"start-error": func(s *story) {
			p := never(pod("start-error", corev1.Container{Name: "main", Image: busybox, Command: []string{"/no/such/program"}, ImagePullPolicy: corev1.PullIfNotPresent}))
			s.run(p)
			got := s.wait("start-error", terminated("main", "StartError", 128))
			if message := status(got, "main").State.Terminated.Message; !strings.Contains(message, "/no/such/program") {
				s.t.Errorf("the message is %q", message)
			}
		},
		"crash-loop": func(s *story) {
			s.run(pod("crash-loop", shell("main", "echo again; exit 3")))
			s.wait("crash-loop", waiting("main", "CrashLoopBackOff", "restarting failed container=main"))
			s.wait("crash-loop", func(p corev1.Pod) error {
				if got := status(p, "main").RestartCount; got < 2 {
					return fmt.Errorf("restarted %d times", got)
				}
				return terminated("main", "Error", 3)(p)
			})
			eventually(s.t, "logs of the one before", func() error {
				got, err := s.logs("crash-loop", "main", "previous=true")
				if err == nil && got != "again\n" {
					err = fmt.Errorf("are %q", got)
				}
				return err
			})
		},
		"no-image": func(s *story) {
			p := pod("no-image", corev1.Container{Name: "main", Image: "registry.k8s.io/no-such-image:1", Command: []string{"true"}})
			s.run(p)
			s.wait("no-image", waiting("main", "ErrImagePull", "no-such-image"))
			s.wait("no-image", waiting("main", "ImagePullBackOff", "Back-off pulling image"))
		},
		"never-pulled": func(s *story) {
			s.run(pod("never-pulled", corev1.Container{Name: "main", Image: "registry.k8s.io/no-such-image:2", ImagePullPolicy: corev1.PullNever}))
			s.wait("never-pulled", waiting("main", "ErrImageNeverPull", "not present"))
		},
		"invalid-image": func(s *story) {
			s.run(pod("invalid-image", corev1.Container{Name: "main", Image: "registry.k8s.io/NO-Image:1"}))
			s.wait("invalid-image", waiting("main", "InvalidImageName", "invalid reference format"))
		},
		"config-error": func(s *story) {
			yes := true
			p := pod("config-error", shell("main", "true"))
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{RunAsNonRoot: &yes}
			s.run(p)
			s.wait("config-error", waiting("main", "CreateContainerConfigError", "run as root"))
		},
		"run-error": func(s *story) {
			p := pod("run-error", shell("main", "true"))
			p.Spec.Containers[0].WorkingDir = "/bin/sh/inside-a-file"
			s.run(p)
			s.wait("run-error", waiting("main", "RunContainerError", "config.working_dir"))
		},
		"message-file": func(s *story) {
			p := never(pod("message-file", shell("main", "echo last words >/dev/termination-log; exit 4")))
			s.run(p)
			s.wantMessage("message-file", "Error", 4, "last words\n")
		},
		"message-elsewhere": func(s *story) {
			p := never(pod("message-elsewhere", shell("main", "echo elsewhere >/tmp/my-words")))
			p.Spec.Containers[0].TerminationMessagePath = "/tmp/my-words"
			s.run(p)
			s.wantMessage("message-elsewhere", "Completed", 0, "elsewhere\n")
		},
		"message-logs": func(s *story) {
			p := never(pod("message-logs", shell("main", "echo of the log; exit 5")))
			p.Spec.Containers[0].TerminationMessagePolicy = corev1.TerminationMessageFallbackToLogsOnError
			s.run(p)
			s.wantMessage("message-logs", "Error", 5, "of the log\n")
		},
		"init-fails": func(s *story) {
			p := never(pod("init-fails", shell("main", "true")))
			p.Spec.InitContainers = []corev1.Container{shell("init", "exit 9")}
			s.run(p)
			got := s.wait("init-fails", terminated("init", "Error", 9))
			s.wantPhase(got, corev1.PodFailed)
			if err := waiting("main", "PodInitializing", "")(got); err != nil {
				s.t.Error(err)
			}
		},
		"deadline": func(s *story) {
			seconds := int64(3)
			p := never(pod("deadline", shell("main", forever)))
			p.Spec.ActiveDeadlineSeconds = &seconds
			s.run(p)
			got := s.wait("deadline", func(p corev1.Pod) error {
				if p.Status.Reason != "DeadlineExceeded" {
					return fmt.Errorf("reason is %q", p.Status.Reason)
				}
				return terminated("main", "Completed", 0)(p)
			})
			s.wantPhase(got, corev1.PodFailed)
		},
	})
}

// wantPhase wants a pod to come to a phase, as the one given may not have yet.
func (s *story) wantPhase(p corev1.Pod, want corev1.PodPhase) {
	s.t.Helper()
	name := strings.TrimSuffix(p.Name, "-"+nodeName)
	s.wait(name, func(p corev1.Pod) error {
		if p.Status.Phase != want {
			return fmt.Errorf("phase is %s, want %s", p.Status.Phase, want)
		}
		return nil
	})
}

// wantMessage wants a container to end with a message.
func (s *story) wantMessage(name, reason string, code int32, message string) {
	s.t.Helper()
	p := s.wait(name, terminated("main", reason, code))
	if got := status(p, "main").State.Terminated.Message; got != message {
		s.t.Errorf("the message is %q, want %q", got, message)
	}
}
