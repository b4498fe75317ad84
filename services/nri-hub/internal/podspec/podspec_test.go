package podspec_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/podspec"
)

const pod = `
apiVersion: v1
kind: Pod
metadata:
  name: web
  labels: {app: web}
spec:
  volumes:
  - name: host
    hostPath: {path: /srv}
  initContainers:
  - {name: first, image: busybox}
  containers:
  - name: main
    image: nginx
    command: [nginx]
    args: ["-g", "daemon off;"]
    env:
    - {name: A, value: "1"}
    - {name: SECRET, valueFrom: {secretKeyRef: {name: s, key: k}}}
    volumeMounts:
    - {name: host, mountPath: /data, readOnly: true}
    resources:
      requests: {cpu: 250m, memory: 32Mi}
      limits: {cpu: "1.5", memory: 64Mi}
`

func TestParse(t *testing.T) {
	t.Parallel()
	p, containers, err := podspec.Parse([]byte(pod))
	if err != nil {
		t.Fatal(err)
	}
	if p.GetName() != "web" || p.GetNamespace() != "default" || p.GetLabels()["app"] != "web" || len(containers) != 2 {
		t.Errorf("pod is %v with %d containers", p, len(containers))
	}
	c := containers[1]
	if containers[0].GetName() != "first" || c.GetName() != "main" {
		t.Errorf("order is %v", containers)
	}
	if !slices.Equal(c.GetArgs(), []string{"nginx", "-g", "daemon off;"}) || !slices.Equal(c.GetEnv(), []string{"A=1"}) {
		t.Errorf("container is %v", c)
	}
	if m := c.GetMounts(); len(m) != 1 || m[0].GetSource() != "/srv" || m[0].GetDestination() != "/data" || m[0].GetOptions()[1] != "ro" {
		t.Errorf("mounts are %v", m)
	}
	r := c.GetLinux().GetResources()
	if r.GetCpu().GetShares().GetValue() != 256 || r.GetCpu().GetQuota().GetValue() != 150000 || r.GetMemory().GetLimit().GetValue() != 64<<20 {
		t.Errorf("resources are %v", r)
	}
}

func TestMistakesAreNamed(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"kind: Deployment":               "Deployment",
		"kind: [":                        "yaml",
		"kind: Pod\nmetadata: {name: x}": "spec.containers",
		"kind: Pod\nmetadata: {name: x}\nspec: {containers: [{}]}": "name",
		strings.Replace(pod, "64Mi", "64Xi", 1):                    "64Xi",
		strings.Replace(pod, "250m", "-1", 1):                      "-1",
		strings.Replace(pod, "250m", "1mm", 1):                     "1mm",
	} {
		_, _, err := podspec.Parse([]byte(text))
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want it to name %q", text, err, want)
		}
	}
}
