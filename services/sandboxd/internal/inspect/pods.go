package inspect

import (
	"bufio"
	"bytes"
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/config"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/inspect/rules"
)

// dialTime bounds the question whether a shim answers.
const dialTime = time.Second

// Pod is a sandbox with its containers and its shim.
type Pod struct {
	ID        string `json:"id"`
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	State     string `json:"state"`
	Shim      Shim   `json:"shim"`
	// Containers are the recorded containers, oldest first.
	Containers []Container `json:"containers"`
}

// Shim is the shim of a pod.
type Shim struct {
	// Pid of the process; 0 if there is none.
	Pid int `json:"pid"`
	// Connection is "open" if the socket takes connections, "refused" if it does not, and
	// "none" if no socket is known.
	Connection string `json:"connection"`
	// RSS and PSS are its memory in bytes: what is resident, and the same with shared pages
	// counted by share.
	RSS int64 `json:"rss_bytes"`
	PSS int64 `json:"pss_bytes"`
}

// Container is a recorded container.
type Container struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	State string `json:"state"`
	Pid   uint32 `json:"pid"`
}

// Pods lists the pods of the records with what their shims are like now, oldest first.
func Pods(ctx context.Context, cfg config.Config) ([]Pod, error) {
	rec, err := ReadRecords(ctx, cfg.Root)
	if err != nil {
		return nil, err
	}
	m := machine{Root: cfg.Root, State: cfg.State}
	err = m.lookAtProcesses()
	if err != nil {
		return nil, err
	}
	pods := podsOf(rec)
	for i := range pods {
		pods[i].Shim = shimOf(ctx, filepath.Join(cfg.State, "shims", pods[i].ID), m.Shims[pods[i].ID])
	}
	return pods, nil
}

// podsOf makes the list from the records alone.
func podsOf(rec rules.Records) []Pod {
	slices.SortFunc(rec.Sandboxes, func(a, b *recordv1.Sandbox) int {
		return a.GetCreatedAt().AsTime().Compare(b.GetCreatedAt().AsTime())
	})
	slices.SortFunc(rec.Containers, func(a, b *recordv1.Container) int {
		return a.GetCreatedAt().AsTime().Compare(b.GetCreatedAt().AsTime())
	})
	pods := []Pod{}
	for _, s := range rec.Sandboxes {
		p := Pod{
			ID: s.GetId(), Name: s.GetConfig().GetMetadata().GetName(), Namespace: s.GetConfig().GetMetadata().GetNamespace(),
			State: rules.SandboxState(s), Containers: []Container{},
		}
		if s.GetState() == recordv1.SandboxState_SANDBOX_STATE_READY && s.GetExitedAt() != nil {
			p.State = "NOTREADY"
		}
		for _, c := range rec.Containers {
			if c.GetSandboxId() == s.GetId() {
				p.Containers = append(p.Containers, Container{
					ID: c.GetId(), Name: c.GetConfig().GetMetadata().GetName(), State: rules.ContainerState(c), Pid: c.GetPid(),
				})
			}
		}
		pods = append(pods, p)
	}
	return pods
}

func shimOf(ctx context.Context, bundle string, pids []int) Shim {
	var s Shim
	for _, pid := range pids {
		s.Pid = pid
		rss, pss := memory(filepath.Join("/proc", strconv.Itoa(pid)))
		s.RSS += rss
		s.PSS += pss
	}
	s.Connection = connection(ctx, socketPath(readAddress(bundle)))
	return s
}

// connection tries whether a socket takes connections.
func connection(ctx context.Context, socket string) string {
	if socket == "" {
		return "none"
	}
	d := net.Dialer{Timeout: dialTime}
	c, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return "refused"
	}
	_ = c.Close()
	return "open"
}

// memory reads what a process uses in bytes; zeros if it has ended.
func memory(proc string) (rss, pss int64) {
	text, err := os.ReadFile(filepath.Join(proc, "smaps_rollup"))
	if err != nil {
		return 0, 0
	}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		field := strings.Fields(lines.Text())
		if len(field) != 3 || field[2] != "kB" {
			continue
		}
		n, err := strconv.ParseInt(field[1], 10, 64)
		if err != nil {
			continue
		}
		switch field[0] {
		case "Rss:":
			rss = n << 10
		case "Pss:":
			pss = n << 10
		}
	}
	return rss, pss
}
