//go:build kubelet

package kubelet

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"github.com/crisp-cri/crisp/tests/testenv"
)

const (
	nodeName = "node-1"
	server   = "https://127.0.0.1:10250"
)

// options are what a story's node has otherwise than others.
type options struct {
	gates     map[string]bool
	configure func(config map[string]any)
	setup     testenv.Setup
	// expected are errors that kubelet's log may hold.
	expected []string
}

// node is a system with a kubelet on it.
type node struct {
	*testenv.System

	t       *testing.T
	options options
	program string
	config  map[string]any
	cmd     *exec.Cmd
	ended   chan error
}

// start makes a node for one test. At its end the pods are taken away by kubelet itself.
func start(t *testing.T, options options) *node {
	t.Helper()
	program, err := testenv.Binary("kubelet")
	must(t, err)
	must(t, furnish())
	if options.setup.Images == nil {
		options.setup.Images, err = images()
		must(t, err)
	}
	configure := options.setup.Configure
	options.setup.Configure = func(p testenv.Process, settings testenv.Settings) {
		if p == testenv.Sandboxd {
			settings.Set("cadvisor.socket", "/run/containerd/containerd.sock")
		}
		if configure != nil {
			configure(p, settings)
		}
	}
	options.setup.KeepFolder = os.Getenv("CRISP_TEST_KEEP") != ""
	n := &node{System: testenv.Start(t, options.setup), t: t, options: options, program: program}
	for _, dir := range []string{"manifests", "kubelet", "podlogs"} {
		must(t, os.MkdirAll(n.Path(dir), 0o755))
	}
	must(t, n.eachGroup(func(dir string) error { return os.MkdirAll(dir, 0o755) }))
	t.Cleanup(n.end)
	n.config = n.configuration()
	if options.configure != nil {
		options.configure(n.config)
	}
	n.startKubelet()
	return n
}

func (n *node) configuration() map[string]any {
	return map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"address": "127.0.0.1", "port": 10250, "healthzPort": 10248,
		"authentication": map[string]any{"webhook": map[string]any{"enabled": false}, "anonymous": map[string]any{"enabled": true}},
		"authorization":  map[string]any{"mode": "AlwaysAllow"},
		"failSwapOn":     false, "failCgroupV1": false,
		"containerRuntimeEndpoint": "unix://" + n.Socket(),
		"staticPodPath":            n.Path("manifests"),
		"podLogsDir":               n.Path("podlogs"),
		"volumePluginDir":          n.Path("kubelet", "plugins"),
		"cgroupRoot":               n.CgroupParent(),
		"oomScoreAdj":              0,
		"makeIPTablesUtilChains":   false,
		"registryPullQPS":          0,
		"volumeStatsAggPeriod":     "3s",
		// The disk is the machine's, and nobody's business here.
		"evictionHard":                map[string]string{"memory.available": "1Mi"},
		"imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
		"crashLoopBackOff": map[string]any{"maxContainerRestartPeriod": "2s"},
		"featureGates":     n.options.gates,
	}
}

func (n *node) logPath() string { return n.Path("logs", "kubelet.log") }

// startKubelet starts kubelet and waits until it says that it is well.
func (n *node) startKubelet() {
	n.t.Helper()
	text, err := json.MarshalIndent(n.config, "", "  ")
	must(n.t, err)
	must(n.t, os.WriteFile(n.Path("etc", "kubelet.json"), text, 0o644))
	log, err := os.OpenFile(n.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	must(n.t, err)
	defer func() { _ = log.Close() }()
	n.cmd = exec.Command(n.program, "--config="+n.Path("etc", "kubelet.json"), "--hostname-override="+nodeName, "--node-ip="+nodeAddress,
		"--root-dir="+n.Path("kubelet"), "--cert-dir="+n.Path("kubelet", "pki"), "--v=3")
	n.cmd.Stdout, n.cmd.Stderr = log, log
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must(n.t, n.cmd.Start())
	ended := make(chan error, 1)
	go func(cmd *exec.Cmd) { ended <- cmd.Wait() }(n.cmd)
	n.ended = ended
	eventually(n.t, "kubelet is well", func() error {
		select {
		case err := <-ended:
			ended <- err
			n.t.Fatalf("kubelet ended: %v\n%s", err, n.kubeletLog(8<<10))
		default:
		}
		_, err := n.get("/healthz")
		return err
	})
}

// stopKubelet ends kubelet; pods go on.
func (n *node) stopKubelet() {
	n.t.Helper()
	if n.cmd == nil {
		return
	}
	if err := n.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		n.t.Error(err)
	}
	select {
	case <-n.ended:
	case <-time.After(time.Minute):
		n.t.Error("kubelet did not end within a minute")
		_ = n.cmd.Process.Kill()
		<-n.ended
	}
	n.cmd = nil
}

// end takes all pods away by kubelet, ends it and looks at what it had to complain about.
func (n *node) end() {
	defer func() {
		if n.t.Failed() {
			fmt.Fprintf(n.t.Output(), "--- kubelet.log ---\n%s\n", n.kubeletLog(96<<10))
		}
	}()
	defer func() { must(n.t, n.removeGroups()) }()
	defer n.stopKubelet()
	left, err := filepath.Glob(n.Path("manifests", "*"))
	must(n.t, err)
	for _, path := range left {
		must(n.t, os.Remove(path))
	}
	if n.cmd != nil {
		eventually(n.t, "kubelet has ended all pods", n.idle)
	}
	n.complaints()
}

// idle says what is left of pods where there should be none.
func (n *node) idle() error {
	pods, err := n.pods(context.Background())
	if err != nil {
		return err
	}
	for _, p := range pods {
		return fmt.Errorf("pod %s is still there", p.Name)
	}
	groups, err := n.podGroups()
	if err != nil {
		return err
	}
	if len(groups) > 0 {
		return fmt.Errorf("control groups of pods are left: %v", groups)
	}
	dirs, err := filepath.Glob(n.Path("kubelet", "pods", "*"))
	if err == nil && len(dirs) > 0 {
		err = fmt.Errorf("kubelet's folders of pods are left: %v", dirs)
	}
	return err
}

// eachGroup calls do for the folder of the system's pods in each hierarchy of control groups.
func (n *node) eachGroup(do func(dir string) error) error {
	hierarchies, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return err
	}
	var problems []error
	for _, h := range hierarchies {
		problems = append(problems, do(filepath.Join(h.Mountpoint, n.CgroupParent())))
	}
	return errors.Join(problems...)
}

// podGroups are the control groups of single pods.
func (n *node) podGroups() (found []string, err error) {
	err = n.walkGroups(func(dir string) error {
		if strings.HasPrefix(filepath.Base(dir), "pod") {
			found = append(found, dir)
		}
		return nil
	})
	return found, err
}

// removeGroups removes kubelet's own control groups, which it leaves. Those of pods are not removed.
func (n *node) removeGroups() error {
	return n.walkGroups(func(dir string) error {
		switch filepath.Base(dir) {
		case "kubepods", "besteffort", "burstable":
			return os.Remove(dir)
		default:
			return nil
		}
	})
}

// walkGroups calls do for all control groups below those of the system, the innermost first.
func (n *node) walkGroups(do func(dir string) error) error {
	return n.eachGroup(func(top string) error {
		var dirs []string
		err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return err
		})
		for _, dir := range slices.Backward(dirs) {
			err = errors.Join(err, do(dir))
		}
		return err
	})
}

// kubeletLog is the end of kubelet's log.
func (n *node) kubeletLog(most int) string {
	text, err := os.ReadFile(n.logPath())
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-most):])
}

// ordinary are words of errors that kubelet brings about itself, with each runtime: it asks for the
// status of containers that it has removed, and probes those that it is ending, and for the
// figures of a pod that has no sandbox yet; its own waiting ends.
var ordinary = [][2]string{
	{"ContainerStatus from runtime service failed", "code = NotFound"},
	{"from runtime service failed", "code = Canceled desc = context canceled"},
	{"ExecSync cmd from runtime service failed", "the container has ended"},
	{"ExecSync cmd from runtime service failed", "is exited, not running"},
	{"PodSandbox from runtime service failed", `podSandboxID=""`},
	{"Failed to create existing container", "code = NotFound"},
	{"Failed to process watch event", "code = NotFound"},
}

// complaints fails the test for each error of calls to the runtime in kubelet's log that nothing explains.
func (n *node) complaints() {
	text, err := os.ReadFile(n.logPath())
	must(n.t, err)
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "E") && !strings.HasPrefix(line, "W") || !strings.Contains(line, "rpc error") && !strings.Contains(line, "runtime service") {
			continue
		}
		if slices.ContainsFunc(ordinary, func(words [2]string) bool {
			return strings.Contains(line, words[0]) && strings.Contains(line, words[1])
		}) {
			continue
		}
		if !slices.ContainsFunc(n.options.expected, func(words string) bool { return strings.Contains(line, words) }) {
			n.t.Errorf("kubelet's log: %s", strings.TrimSpace(line))
		}
	}
}

// client trusts the certificate that kubelet has made itself.
var client = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}

// restConfig is how the streaming clients reach kubelet.
func restConfig() *rest.Config {
	return &rest.Config{Host: server, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
}

// get asks kubelet's server; the answer must be OK.
func (n *node) get(path string) (string, error) {
	return n.ask(context.Background(), http.MethodGet, path)
}

func (n *node) ask(ctx context.Context, method, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, server+path, nil)
	if err != nil {
		return "", err
	}
	answer, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer func() { _ = answer.Body.Close() }()
	var body bytes.Buffer
	if _, err := io.Copy(&body, answer.Body); err != nil {
		return "", err
	}
	if answer.StatusCode != http.StatusOK {
		return body.String(), fmt.Errorf("%s %s: %s: %s", method, path, answer.Status, strings.TrimSpace(body.String()))
	}
	return body.String(), nil
}

// pods is what kubelet says of its pods.
func (n *node) pods(ctx context.Context) ([]corev1.Pod, error) {
	text, err := n.ask(ctx, http.MethodGet, "/pods")
	if err != nil {
		return nil, err
	}
	var list corev1.PodList
	return list.Items, json.Unmarshal([]byte(text), &list)
}
