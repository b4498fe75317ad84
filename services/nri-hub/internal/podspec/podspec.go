// Package podspec turns a pod's manifest, as kubectl takes it, into what NRI plugins are
// shown of a pod and its containers.
//
// It knows what plugins look at: metadata, commands, variables with a value of their own,
// mounts of host paths, and resources. What only a cluster could resolve (secrets, claims,
// defaults by admission) is left out. The package is pure.
package podspec

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"go.yaml.in/yaml/v3"
)

type manifest struct {
	Kind     string `yaml:"kind"`
	Metadata struct {
		Name        string            `yaml:"name"`
		Namespace   string            `yaml:"namespace"`
		UID         string            `yaml:"uid"`
		Labels      map[string]string `yaml:"labels"`
		Annotations map[string]string `yaml:"annotations"`
	} `yaml:"metadata"`
	Spec struct {
		RuntimeClassName string      `yaml:"runtimeClassName"`
		Volumes          []volume    `yaml:"volumes"`
		InitContainers   []container `yaml:"initContainers"`
		Containers       []container `yaml:"containers"`
	} `yaml:"spec"`
}

type volume struct {
	Name     string `yaml:"name"`
	HostPath *struct {
		Path string `yaml:"path"`
	} `yaml:"hostPath"`
}

type container struct {
	Name    string   `yaml:"name"`
	Image   string   `yaml:"image"`
	Command []string `yaml:"command"`
	Args    []string `yaml:"args"`
	Env     []struct {
		Name  string  `yaml:"name"`
		Value *string `yaml:"value"`
	} `yaml:"env"`
	VolumeMounts []struct {
		Name      string `yaml:"name"`
		MountPath string `yaml:"mountPath"`
		ReadOnly  bool   `yaml:"readOnly"`
	} `yaml:"volumeMounts"`
	Resources struct {
		Limits   map[string]string `yaml:"limits"`
		Requests map[string]string `yaml:"requests"`
	} `yaml:"resources"`
}

// Parse reads a manifest in YAML or JSON. The containers are in the order in which they
// are made. Ids are left empty. What is wrong with it is errdefs.ErrInvalidArgument.
func Parse(text []byte) (*nri.PodSandbox, []*nri.Container, error) {
	var m manifest
	if err := yaml.Unmarshal(text, &m); err != nil {
		return nil, nil, invalid(err)
	}
	if m.Kind != "Pod" {
		return nil, nil, invalid(fmt.Errorf("kind: is %q, only a Pod can be tried", m.Kind))
	}
	all := append(m.Spec.InitContainers, m.Spec.Containers...)
	if m.Metadata.Name == "" || len(all) == 0 {
		return nil, nil, invalid(errors.New("metadata.name and spec.containers are wanted"))
	}
	pod := &nri.PodSandbox{
		Name:           m.Metadata.Name,
		Namespace:      m.Metadata.Namespace,
		Uid:            m.Metadata.UID,
		Labels:         m.Metadata.Labels,
		Annotations:    m.Metadata.Annotations,
		RuntimeHandler: m.Spec.RuntimeClassName,
	}
	if pod.GetNamespace() == "" {
		pod.Namespace = "default"
	}
	hostPaths := make(map[string]string)
	for _, v := range m.Spec.Volumes {
		if v.HostPath != nil {
			hostPaths[v.Name] = v.HostPath.Path
		}
	}
	var list []*nri.Container
	for i, c := range all {
		out, err := c.convert(pod, hostPaths)
		if err != nil {
			return nil, nil, invalid(fmt.Errorf("container %d %q: %w", i, c.Name, err))
		}
		list = append(list, out)
	}
	return pod, list, nil
}

func invalid(err error) error {
	return fmt.Errorf("pod manifest: %w: %w", err, errdefs.ErrInvalidArgument)
}

func (c container) convert(pod *nri.PodSandbox, hostPaths map[string]string) (*nri.Container, error) {
	if c.Name == "" {
		return nil, errors.New("name: is missing")
	}
	out := &nri.Container{
		Name: c.Name,
		Args: append(append([]string(nil), c.Command...), c.Args...),
		Labels: map[string]string{
			"io.kubernetes.container.name": c.Name,
			"io.kubernetes.pod.name":       pod.GetName(),
			"io.kubernetes.pod.namespace":  pod.GetNamespace(),
			"io.kubernetes.pod.uid":        pod.GetUid(),
		},
		Image: &nri.Image{Name: c.Image},
	}
	for _, e := range c.Env {
		if e.Value != nil {
			out.Env = append(out.Env, e.Name+"="+*e.Value)
		}
	}
	for _, v := range c.VolumeMounts {
		mount := &nri.Mount{Destination: v.MountPath, Type: "bind", Source: hostPaths[v.Name], Options: []string{"rbind", "rw"}}
		if v.ReadOnly {
			mount.Options[1] = "ro"
		}
		out.Mounts = append(out.Mounts, mount)
	}
	resources, err := c.resources()
	if err != nil {
		return nil, err
	}
	out.Linux = &nri.LinuxContainer{Resources: resources}
	return out, nil
}

// cpuPeriod is kubelet's, in microseconds.
const cpuPeriod = 100000

// resources are what kubelet makes of requests and limits.
func (c container) resources() (*nri.LinuxResources, error) {
	r := &nri.LinuxResources{Cpu: &nri.LinuxCPU{}, Memory: &nri.LinuxMemory{}}
	read := func(from map[string]string, name string, use func(float64)) error {
		text, ok := from[name]
		if !ok {
			return nil
		}
		v, err := quantity(text)
		if err != nil {
			return fmt.Errorf("resources: %s: %w", name, err)
		}
		use(v)
		return nil
	}
	requests := c.Resources.Requests
	if _, ok := requests["cpu"]; !ok {
		requests = c.Resources.Limits
	}
	return r, errors.Join(
		read(requests, "cpu", func(v float64) { r.Cpu.Shares = nri.UInt64(uint64(max(2, v*1024))) }),
		read(c.Resources.Limits, "cpu", func(v float64) {
			r.Cpu.Period = nri.UInt64(uint64(cpuPeriod))
			r.Cpu.Quota = nri.Int64(int64(max(1000, v*cpuPeriod)))
		}),
		read(c.Resources.Limits, "memory", func(v float64) { r.Memory.Limit = nri.Int64(int64(v)) }),
	)
}

// quantity reads a Kubernetes quantity, such as "500m" or "64Mi".
func quantity(text string) (float64, error) {
	number := strings.TrimRight(text, "mkMGTPEi")
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || v < 0 || math.IsInf(v, 0) {
		return 0, fmt.Errorf("%q is no quantity, write for example \"500m\" or \"64Mi\"", text)
	}
	scale := map[string]float64{
		"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
		"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60,
	}
	s, ok := scale[text[len(number):]]
	if !ok {
		return 0, fmt.Errorf("%q is no quantity, write for example \"500m\" or \"64Mi\"", text)
	}
	return v * s, nil
}
