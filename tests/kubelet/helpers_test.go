//go:build kubelet

package kubelet

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"syscall"

	corev1 "k8s.io/api/core/v1"
)

// wantDo runs a command in a container, which must say exactly what is wanted.
func (s *story) wantDo(want, name, container string, command ...string) {
	s.t.Helper()
	if got := s.do(name, container, command...); got != want {
		s.t.Errorf("%q in %s/%s said %q, want %q", command, name, container, got, want)
	}
}

// script runs a shell script in a container by an exec over WebSocket and gives its output.
func (s *story) script(name, container, script string) string {
	s.t.Helper()
	out, err := s.exec(overWebSocket, name, container, "", "sh", "-c", script)
	if err != nil {
		s.t.Fatalf("script %q in %s/%s: %v", script, name, container, err)
	}
	return out
}

// wantPage waits until a web server gives a page with these words.
func (s *story) wantPage(address, words string) {
	s.t.Helper()
	eventually(s.t, "page "+address, func() error {
		request, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, address, nil)
		if err != nil {
			return err
		}
		answer, err := client.Do(request)
		if err != nil {
			return err
		}
		defer func() { _ = answer.Body.Close() }()
		page, err := io.ReadAll(answer.Body)
		if err == nil && (answer.StatusCode != http.StatusOK || !strings.Contains(string(page), words)) {
			err = fmt.Errorf("%s: %q", answer.Status, page)
		}
		return err
	})
}

// hostFolder is a volume of a folder of the node.
func hostFolder(name, path string) corev1.Volume {
	kind := corev1.HostPathDirectory
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path, Type: &kind}}}
}

// everywhere mounts volumes into all containers of a pod.
func everywhere(p *corev1.Pod, mounts ...corev1.VolumeMount) {
	for _, list := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range list {
			list[i].VolumeMounts = append(list[i].VolumeMounts, mounts...)
		}
	}
}

// execHandler is a probe or hook that runs a command.
func execHandler(command ...string) corev1.ProbeHandler {
	return corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: command}}
}

// field is the word after a key in a text of lines.
func field(text, key string) string {
	for line := range strings.Lines(text) {
		if words := strings.Fields(line); len(words) > 1 && words[0] == key {
			return words[1]
		}
	}
	return ""
}

// mountLine is the line of a mount point in the form of /proc/mounts.
func mountLine(mounts, point string) string {
	for line := range strings.Lines(mounts) {
		if words := strings.Fields(line); len(words) > 1 && words[1] == point {
			return line
		}
	}
	return ""
}

func owner(info os.FileInfo) uint32 { return info.Sys().(*syscall.Stat_t).Uid }
