//go:build kubelet

package kubelet

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Figures of pods and containers come through kubelet, wherever it takes them from.
func TestStatistics(t *testing.T) {
	for name, gates := range map[string]map[string]bool{"cadvisor": nil, "cri": {"PodAndContainerStatsFromCRI": true}} {
		t.Run(name, func(t *testing.T) {
			n := start(t, options{gates: gates})
			s := n.story(t)
			p := pod("figures", shell("main", "head -c 5000000 /dev/zero >/file; head -c 4000000 /dev/zero >/volume/file; "+
				"head -c 200000 /dev/zero | tr '\\0' '\\n'; while true; do sleep 0.1; : $((i++)); done"), shell("other", forever))
			p.Spec.Containers[0].Resources = corev1.ResourceRequirements{
				Limits: corev1.ResourceList{"cpu": resource.MustParse("500m"), "memory": resource.MustParse("64Mi")},
			}
			p.Spec.Volumes = []corev1.Volume{{Name: "volume", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			everywhere(p, corev1.VolumeMount{Name: "volume", MountPath: "/volume"})
			init := shell("init", "true")
			p.Spec.InitContainers = []corev1.Container{init}
			shared := pod("shared-figures", shell("main", forever))
			yes := true
			shared.Spec.ShareProcessNamespace = &yes
			s.run(shared)
			got := s.runReady(p)
			s.wait("shared-figures", ready)
			for _, name := range []string{"figures", "shared-figures"} {
				eventually(t, "summary of "+name, func() error { return s.summarised(name) })
			}
			eventually(t, "exact figures", func() error { return s.exactFigures("figures") })
			eventually(t, "metrics of cAdvisor", func() error {
				err := s.cadvisorMetrics(got)
				if name == "cri" && err == nil {
					// kubelet's own reading knows no file systems of containers.
					err = s.metric("container_fs_usage_bytes", map[string]string{"pod": got.Name, "container": "main"}, 5000000)
				}
				return err
			})
			eventually(t, "metrics of resources", func() error { return s.resourceMetrics(got) })
		})
	}
}

// The parts of the Summary API that are looked at.
type (
	summaryNumber struct {
		UsageNanoCores, UsageCoreNanoSeconds, WorkingSetBytes, UsageBytes, RSSBytes, AvailableBytes *uint64
		RxBytes, TxBytes, UsedBytes, CapacityBytes, InodesUsed                                      *uint64
		Name                                                                                        string
	}
	summaryContainer struct {
		Name                      string
		CPU, Memory, Rootfs, Logs *summaryNumber
	}
	summaryPod struct {
		PodRef               struct{ Name, Namespace, UID string }
		Containers           []summaryContainer
		CPU, Memory, Network *summaryNumber
		Volume               []summaryNumber
		EphemeralStorage     *summaryNumber `json:"ephemeral-storage"`
		ProcessStats         *struct {
			ProcessCount *uint64 `json:"process_count"`
		} `json:"process_stats"`
	}
)

func (s *story) summary(name string) (summaryPod, error) {
	text, err := s.get("/stats/summary")
	if err != nil {
		return summaryPod{}, err
	}
	var all struct{ Pods []summaryPod }
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return summaryPod{}, err
	}
	for _, p := range all.Pods {
		if p.PodRef.Name == podName(name) {
			return p, nil
		}
	}
	return summaryPod{}, fmt.Errorf("no pod %s among %d", name, len(all.Pods))
}

// summarised wants all kinds of figures of a pod.
func (s *story) summarised(name string) error {
	p, err := s.summary(name)
	if err != nil {
		return err
	}
	var lacking []string
	want := func(what string, there bool) {
		if !there {
			lacking = append(lacking, what)
		}
	}
	positive := func(n *uint64) bool { return number(n) > 0 }
	want("network", p.Network != nil && p.Network.Name == "eth0" && positive(p.Network.RxBytes) && positive(p.Network.TxBytes))
	want("cpu", p.CPU != nil && positive(p.CPU.UsageCoreNanoSeconds) && p.CPU.UsageNanoCores != nil)
	want("memory", p.Memory != nil && positive(p.Memory.WorkingSetBytes))
	want("processes", p.ProcessStats != nil && positive(p.ProcessStats.ProcessCount))
	want("ephemeral storage", p.EphemeralStorage != nil && positive(p.EphemeralStorage.UsedBytes))
	want("containers", len(p.Containers) > 0)
	for _, c := range p.Containers {
		want(c.Name+" cpu", c.CPU != nil && positive(c.CPU.UsageCoreNanoSeconds) && c.CPU.UsageNanoCores != nil)
		want(c.Name+" memory", c.Memory != nil && positive(c.Memory.WorkingSetBytes) && positive(c.Memory.RSSBytes))
		want(c.Name+" rootfs", c.Rootfs != nil && positive(c.Rootfs.UsedBytes) && positive(c.Rootfs.CapacityBytes) && positive(c.Rootfs.InodesUsed))
		want(c.Name+" logs", c.Logs != nil && c.Logs.UsedBytes != nil && positive(c.Logs.CapacityBytes))
	}
	if len(lacking) > 0 {
		text, _ := json.Marshal(p)
		return fmt.Errorf("lacks %v: %s", lacking, text)
	}
	return nil
}

// exactFigures wants those that are known.
func (s *story) exactFigures(name string) error {
	p, err := s.summary(name)
	if err != nil {
		return err
	}
	at := slices.IndexFunc(p.Containers, func(c summaryContainer) bool { return c.Name == "main" })
	if at < 0 || len(p.Containers) != 2 || len(p.Volume) != 1 {
		return fmt.Errorf("containers are %+v, volumes %+v", p.Containers, p.Volume)
	}
	main := p.Containers[at]
	if main.Rootfs == nil || main.Logs == nil || main.Memory == nil || p.ProcessStats == nil {
		return fmt.Errorf("figures of main are %+v", main)
	}
	for what, pair := range map[string][2]uint64{
		"bytes in the root file system": {number(main.Rootfs.UsedBytes), 5000000},
		"bytes of logs":                 {number(main.Logs.UsedBytes), 200000 * 40},
		"bytes of the volume":           {number(p.Volume[0].UsedBytes), 4000000},
	} {
		if got, want := pair[0], pair[1]; got < want || got > want+want/4 {
			return fmt.Errorf("%s: %d, want about %d", what, got, want)
		}
	}
	// Two shells, and a sleep for each.
	if got := number(p.ProcessStats.ProcessCount); got < 3 || got > 5 {
		return fmt.Errorf("%d processes", got)
	}
	if got := number(main.Memory.AvailableBytes); got == 0 || got > 64<<20 {
		return fmt.Errorf("%d bytes of memory available", got)
	}
	return nil
}

// number is a figure, 0 if it is missing.
func number(n *uint64) uint64 {
	if n == nil {
		return 0
	}
	return *n
}

// cadvisorMetrics wants series of the pod and its containers with their labels.
func (s *story) cadvisorMetrics(p corev1.Pod) error {
	text, err := s.get("/metrics/cadvisor")
	if err != nil {
		return err
	}
	id := strings.TrimPrefix(status(p, "main").ContainerID, "crisp://")
	of := func(container string) map[string]string {
		return map[string]string{"pod": p.Name, "namespace": namespace, "container": container}
	}
	with := func(labels map[string]string, key, value string) map[string]string {
		labels[key] = value
		return labels
	}
	for _, m := range []struct {
		name   string
		labels map[string]string
		least  float64
	}{
		{"container_cpu_usage_seconds_total", with(of("main"), "name", id), 0},
		{"container_memory_working_set_bytes", with(of("main"), "image", busybox), 1},
		{"container_memory_rss", of("other"), 1},
		{"container_spec_memory_limit_bytes", of("main"), 64 << 20},
		{"container_spec_cpu_quota", of("main"), 50000},
		{"container_processes", of("main"), 1},
		{"container_start_time_seconds", of("main"), 1e9},
		{"container_network_receive_bytes_total", with(of(""), "interface", "eth0"), 1},
		{"container_network_transmit_packets_total", with(of(""), "interface", "eth0"), 1},
		{"container_memory_usage_bytes", of(""), 1},
	} {
		if err := series(text, m.name, m.labels, m.least); err != nil {
			return err
		}
	}
	return nil
}

// metric wants one series of /metrics/cadvisor.
func (s *story) metric(name string, labels map[string]string, least float64) error {
	text, err := s.get("/metrics/cadvisor")
	if err != nil {
		return err
	}
	return series(text, name, labels, least)
}

func (s *story) resourceMetrics(p corev1.Pod) error {
	text, err := s.get("/metrics/resource")
	if err != nil {
		return err
	}
	ofPod := map[string]string{"pod": p.Name, "namespace": namespace}
	ofMain := map[string]string{"pod": p.Name, "namespace": namespace, "container": "main"}
	return errors.Join(series(text, "container_cpu_usage_seconds_total", ofMain, 0), series(text, "container_memory_working_set_bytes", ofMain, 1),
		series(text, "container_start_time_seconds", ofMain, 1e9), series(text, "pod_cpu_usage_seconds_total", ofPod, 0),
		series(text, "pod_memory_working_set_bytes", ofPod, 1), series(text, "resource_scrape_error", nil, 0))
}

// series wants one of a name and labels whose value is that at least.
func series(text, name string, labels map[string]string, least float64) error {
	var seen []string
	for line := range strings.Lines(text) {
		rest, found := strings.CutPrefix(line, name)
		if !found || rest == "" || rest[0] != '{' && rest[0] != ' ' {
			continue
		}
		all, value := "", strings.TrimSpace(rest)
		if at := strings.LastIndex(rest, "} "); at >= 0 {
			all, value = rest[:at+1], strings.TrimSpace(rest[at+2:])
		}
		if !slices.ContainsFunc(slices.Collect(maps.Keys(labels)), func(key string) bool { return !hasLabel(all, key, labels[key]) }) {
			got, err := strconv.ParseFloat(strings.Fields(value)[0], 64)
			if err == nil && got >= least {
				return nil
			}
			seen = append(seen, strings.TrimSpace(line))
		}
	}
	return fmt.Errorf("no series %s with %v of at least %v, but %v", name, labels, least, seen)
}

func hasLabel(all, key, value string) bool {
	return strings.Contains(all, "{"+key+`="`+value+`"`) || strings.Contains(all, ","+key+`="`+value+`"`)
}
