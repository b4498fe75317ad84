//go:build kubelet

package kubelet

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// What a pod may ask for is there, as kubelet and the programs inside of it see it.
func TestPods(t *testing.T) { //nolint:tparallel // Nodes take turns, since a kubelet has ports.
	n := start(t, options{})
	n.stories(t, map[string]func(*story){
		"plain": plain, "order": order, "shared": sharedProcesses, "hostnet": hostNetwork, "security": security,
		"hostport": hostPort, "limits": limits, "usernamespace": userNamespace,
		"emptydir": emptyDirs, "hostpath": hostPaths, "downward": downward, "image-volume": imageVolume,
	})
}

func plain(s *story) {
	p := s.runReady(pod("plain", shell("main", "echo hello; "+forever)))
	s.wantLogs("plain", "main", "", "hello\n")
	s.wantDo("there\n", "plain", "main", "echo", "there")
	if ip := net.ParseIP(p.Status.PodIP); ip == nil || !strings.HasPrefix(p.Status.PodIP, "10.88.") {
		s.t.Errorf("the pod's address is %q", p.Status.PodIP)
	}
	c := status(p, "main")
	if c.Image != busybox || !strings.HasPrefix(c.ContainerID, "crisp://") || !strings.Contains(c.ImageID, "@sha256:") {
		s.t.Errorf("image %q, image id %q, container %q", c.Image, c.ImageID, c.ContainerID)
	}
	s.wantDo(podName("plain")+"\n", "plain", "main", "hostname")
}

// Init containers run one after the other, a sidecar goes on beside the others and ends after them.
func order(s *story) {
	always := corev1.ContainerRestartPolicyAlways
	note := func(text, then string) string { return "echo " + text + " >>/common/notes; " + then }
	sidecar := shell("sidecar", note("sidecar", "trap 'echo sidecar ends >>/common/notes; exit 0' TERM; touch /common/up; sleep 100000 & wait"))
	sidecar.RestartPolicy = &always
	sidecar.StartupProbe = &corev1.Probe{ProbeHandler: execHandler("test", "-e", "/common/up"), PeriodSeconds: 1, FailureThreshold: 60}
	p := pod("order",
		shell("first", note("main", "trap 'sleep 1; echo main ends >>/common/notes; exit 0' TERM; sleep 100000 & wait")),
		shell("second", forever))
	p.Spec.InitContainers = []corev1.Container{shell("one", note("one", "sleep 1")), sidecar, shell("two", note("two", "test -e /common/up"))}
	folder := s.Path("order")
	must(s.t, os.MkdirAll(folder, 0o777))
	p.Spec.Volumes = []corev1.Volume{hostFolder("work", folder)}
	everywhere(p, corev1.VolumeMount{Name: "work", MountPath: "/common"})
	got := s.runReady(p)
	for _, name := range []string{"one", "two"} {
		if err := terminated(name, "Completed", 0)(got); err != nil {
			s.t.Error(err)
		}
	}
	if c := status(got, "sidecar"); !c.Ready || c.Started == nil || !*c.Started || c.RestartCount != 0 {
		s.t.Errorf("the sidecar is %+v", c)
	}
	s.remove("order")
	want := "one\nsidecar\ntwo\nmain\nmain ends\nsidecar ends\n"
	if notes, err := os.ReadFile(folder + "/notes"); err != nil || string(notes) != want {
		s.t.Errorf("notes are %q, %v, want %q", notes, err, want)
	}
}

func sharedProcesses(s *story) {
	yes := true
	p := pod("shared", shell("one", "exec sleep 12345"), shell("two", forever))
	p.Spec.ShareProcessNamespace = &yes
	s.runReady(p)
	if out := s.do("shared", "two", "ps"); !strings.Contains(out, "sleep 12345") {
		s.t.Errorf("the other container's process is not seen:\n%s", out)
	}
	if out := s.do("shared", "two", "cat", "/proc/1/comm"); strings.TrimSpace(out) == "sh" || strings.TrimSpace(out) == "sleep" {
		s.t.Errorf("the first process is the container's own, %q", out)
	}
}

func hostNetwork(s *story) {
	p := pod("hostnet", shell("main", "exec busybox httpd -f -p 18080 -h /etc"))
	p.Spec.HostNetwork = true
	p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 18080, HostPort: 18080}}
	s.runReady(p)
	s.wantPage("http://"+nodeAddress+":18080/hostname", "")
}

func security(s *story) {
	yes, no, user, group, fsGroup := true, false, int64(1234), int64(2345), int64(3456)
	p := pod("security", shell("main", forever))
	p.Spec.SecurityContext = &corev1.PodSecurityContext{
		FSGroup: &fsGroup, SupplementalGroups: []int64{4567},
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		Sysctls:        []corev1.Sysctl{{Name: "net.ipv4.ip_unprivileged_port_start", Value: "80"}},
	}
	p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{
		RunAsUser: &user, RunAsGroup: &group, RunAsNonRoot: &yes, ReadOnlyRootFilesystem: &yes, AllowPrivilegeEscalation: &no,
		Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"NET_BIND_SERVICE"}},
	}
	p.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	everywhere(p, corev1.VolumeMount{Name: "scratch", MountPath: "/scratch"})
	second := shell("open", forever)
	second.SecurityContext = &corev1.SecurityContext{
		Capabilities:   &corev1.Capabilities{Add: []corev1.Capability{"NET_ADMIN"}},
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeUnconfined},
	}
	p.Spec.Containers = append(p.Spec.Containers, second)
	s.runReady(p)
	// busybox's id does not know the groups' names.
	words := strings.Fields(strings.TrimSpace(s.script("security", "main", "id -u; id -g; id -G; touch /x 2>&1; touch /scratch/y && stat -c %g /scratch/y; cat /proc/sys/net/ipv4/ip_unprivileged_port_start")))
	want := strings.Fields("1234 2345 2345 3456 4567 touch: /x: Read-only file system 3456 80")
	if strings.Join(words, " ") != strings.Join(want, " ") {
		s.t.Errorf("inside it says %q, want %q", words, want)
	}
	for container, want := range map[string]map[string]string{
		// NET_BIND_SERVICE is not in effect for a user other than root: only what it may get is bounded.
		"main": {"Seccomp:": "2", "NoNewPrivs:": "1", "CapBnd:": "0000000000000400"},
		"open": {"Seccomp:": "0", "NoNewPrivs:": "0", "CapEff:": "00000000a80435fb"},
	} {
		text := s.do("security", container, "cat", "/proc/self/status")
		for key, value := range want {
			if got := field(text, key); got != value {
				if container == "open" && key == "CapEff:" {
					s.t.Logf("capabilities are %s", got)
				}
				s.t.Errorf("%s %s is %q, want %q", container, key, got, value)
			}
		}
	}
}

func hostPort(s *story) {
	p := pod("hostport", corev1.Container{
		Name: "main", Image: "registry.k8s.io/e2e-test-images/nginx:1.14-2", ImagePullPolicy: corev1.PullIfNotPresent,
		Ports: []corev1.ContainerPort{{ContainerPort: 80, HostPort: 18081}},
	})
	got := s.runReady(p)
	s.wantPage("http://"+nodeAddress+":18081/", "Welcome to nginx!")
	s.wantPage("http://"+got.Status.PodIP+"/", "Welcome to nginx!")
}

func limits(s *story) {
	p := pod("limits", shell("main", forever))
	p.Spec.Containers[0].Resources = corev1.ResourceRequirements{
		Requests: corev1.ResourceList{"cpu": resource.MustParse("100m"), "memory": resource.MustParse("32Mi")},
		Limits:   corev1.ResourceList{"cpu": resource.MustParse("250m"), "memory": resource.MustParse("64Mi")},
	}
	got := s.runReady(p)
	if got.Status.QOSClass != corev1.PodQOSBurstable {
		s.t.Errorf("the class is %s", got.Status.QOSClass)
	}
	s.wantDo("67108864\n", "limits", "main", "cat", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
	s.wantDo("25000\n", "limits", "main", "cat", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
	s.wantDo("102\n", "limits", "main", "cat", "/sys/fs/cgroup/cpu/cpu.shares")
	// What kubelet reports as in force it has read from the runtime.
	var resources *corev1.ResourceRequirements
	s.wait("limits", func(p corev1.Pod) error {
		resources = status(p, "main").Resources
		if resources == nil || resources.Limits.Cpu().MilliValue() != 250 || resources.Limits.Memory().Value() != 64<<20 {
			return fmt.Errorf("resources in force are %+v", resources)
		}
		return nil
	})
}

func userNamespace(s *story) {
	no := false
	p := pod("usernamespace", shell("main", "echo mine >/scratch/file; "+forever))
	p.Spec.HostUsers = &no
	p.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	everywhere(p, corev1.VolumeMount{Name: "scratch", MountPath: "/scratch"})
	got := s.runReady(p)
	words := strings.Fields(s.do("usernamespace", "main", "cat", "/proc/self/uid_map"))
	if len(words) != 3 || words[0] != "0" || words[1] == "0" || words[2] != "65536" {
		s.t.Errorf("ids are mapped by %q", words)
	}
	s.wantDo("0\n", "usernamespace", "main", "stat", "-c", "%u", "/scratch/file")
	// On the node the file belongs to root too: the mount maps the ids.
	info, err := os.Stat(s.Path("kubelet", "pods", string(got.UID), "volumes", "kubernetes.io~empty-dir", "scratch", "file"))
	must(s.t, err)
	if owner(info) != 0 {
		s.t.Errorf("on the node the file belongs to %d", owner(info))
	}
}

func emptyDirs(s *story) {
	size := resource.MustParse("8Mi")
	p := pod("emptydir", shell("one", "echo from one >/disk/file; echo from one >/memory/file; "+forever), shell("two", forever))
	p.Spec.Volumes = []corev1.Volume{
		{Name: "disk", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: "memory", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: &size}}},
	}
	everywhere(p, corev1.VolumeMount{Name: "disk", MountPath: "/disk"}, corev1.VolumeMount{Name: "memory", MountPath: "/memory"})
	p.Spec.Containers[1].VolumeMounts = append(p.Spec.Containers[1].VolumeMounts, corev1.VolumeMount{Name: "disk", MountPath: "/part", SubPath: "sub", ReadOnly: true})
	s.runReady(p)
	s.wantDo("from one\nfrom one\n", "emptydir", "two", "cat", "/disk/file", "/memory/file")
	mounts := s.do("emptydir", "two", "cat", "/proc/mounts")
	if line := mountLine(mounts, "/memory"); !strings.Contains(line, " tmpfs ") || !strings.Contains(line, "size=8192k") {
		s.t.Errorf("the volume in memory is mounted as %q", line)
	}
	if line := mountLine(mounts, "/part"); !strings.Contains(line, " ro,") {
		s.t.Errorf("the read-only part is mounted as %q", line)
	}
}

// Mounts made on the node show in the container, and those of a privileged container on the node and in others.
func hostPaths(s *story) {
	folder := s.Path("hostpath")
	must(s.t, os.MkdirAll(folder+"/in", 0o755))
	yes, both, in := true, corev1.MountPropagationBidirectional, corev1.MountPropagationHostToContainer
	p := pod("hostpath", shell("maker", "mount -t tmpfs -o size=1m made /host/in && echo made >/host/in/file && "+forever), shell("user", forever))
	p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: &yes}
	p.Spec.Volumes = []corev1.Volume{hostFolder("host", folder)}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "host", MountPath: "/host", MountPropagation: &both}}
	p.Spec.Containers[1].VolumeMounts = []corev1.VolumeMount{
		{Name: "host", MountPath: "/host", MountPropagation: &in},
		{Name: "host", MountPath: "/closed", ReadOnly: true},
	}
	s.runReady(p)
	eventually(s.t, "mount is seen", func() error {
		text, err := os.ReadFile(folder + "/in/file")
		if err == nil && string(text) != "made\n" {
			err = fmt.Errorf("file on the node is %q", text)
		}
		return err
	})
	s.wantDo("made\n", "hostpath", "user", "cat", "/host/in/file")
	if out := s.script("hostpath", "user", "touch /closed/x 2>&1; true"); !strings.Contains(out, "Read-only file system") {
		s.t.Errorf("writing below a read-only mount said %q", out)
	}
	s.script("hostpath", "maker", "umount /host/in")
}

// Without a control plane kubelet has no projected volumes, but those of the downward API.
func downward(s *story) {
	p := pod("downward", shell("main", forever))
	p.Annotations = map[string]string{"note": "of the pod"}
	p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"memory": resource.MustParse("64Mi")}
	ref := func(path string) *corev1.ObjectFieldSelector { return &corev1.ObjectFieldSelector{FieldPath: path} }
	p.Spec.Volumes = []corev1.Volume{
		{Name: "one", VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: []corev1.DownwardAPIVolumeFile{{Path: "labels", FieldRef: ref("metadata.labels")}}}}},
		{Name: "two", VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: []corev1.DownwardAPIVolumeFile{{Path: "notes", FieldRef: ref("metadata.annotations['note']")}}}}},
	}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "one", MountPath: "/one"}, {Name: "two", MountPath: "/two", ReadOnly: true}}
	p.Spec.Containers[0].Env = []corev1.EnvVar{
		{Name: "IP", ValueFrom: &corev1.EnvVarSource{FieldRef: ref("status.podIP")}},
		{Name: "HOST", ValueFrom: &corev1.EnvVarSource{FieldRef: ref("status.hostIP")}},
		{Name: "MOST", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "limits.memory"}}},
	}
	got := s.runReady(p)
	want := "story=\"downward\"of the pod" + got.Status.PodIP + " " + nodeAddress + " 67108864\n"
	if out := s.script("downward", "main", "cat /one/labels /two/notes; echo $IP $HOST $MOST"); out != want {
		s.t.Errorf("inside it says %q, want %q", out, want)
	}
}

func imageVolume(s *story) {
	const image = "gcr.io/k8s-staging-cri-tools/test-image-1:latest"
	p := pod("image-volume", shell("main", forever))
	p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: image, PullPolicy: corev1.PullIfNotPresent}}}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}, {Name: "data", MountPath: "/part", SubPath: "etc"}}
	s.runReady(p)
	s.wantDo("test-image-1\n", "image-volume", "main", "cat", "/data/etc/fixture-image")
	s.wantDo("test-image-1\n", "image-volume", "main", "cat", "/part/fixture-image")
	if out := s.script("image-volume", "main", "touch /data/x 2>&1; true"); !strings.Contains(out, "Read-only file system") {
		s.t.Errorf("writing into the image said %q", out)
	}
}
