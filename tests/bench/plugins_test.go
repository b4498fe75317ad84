//go:build bench

package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
)

// The program of the bench is also the plugins, in a process of their own.
const (
	socketVariable = "CRISP_BENCH_PLUGINS" // to register at
	countVariable  = "CRISP_BENCH_COUNT"   // of plugins
	delayVariable  = "CRISP_BENCH_DELAY"   // what a plugin takes for a CreateContainer
)

type plugin struct {
	name  string
	delay time.Duration
}

func (*plugin) Synchronize(context.Context, []*nri.PodSandbox, []*nri.Container) ([]*nri.ContainerUpdate, error) {
	fmt.Println("synchronised")
	return nil, nil
}

func (p *plugin) CreateContainer(context.Context, *nri.PodSandbox, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
	time.Sleep(p.delay)
	a := &nri.ContainerAdjustment{}
	a.AddAnnotation("bench/"+p.name, "seen")
	return a, nil, nil
}

func (*plugin) PostCreateContainer(context.Context, *nri.PodSandbox, *nri.Container) error {
	return nil
}

// servePlugins runs the plugins until the standard input ends.
func servePlugins(socket string) int {
	count, err := strconv.Atoi(os.Getenv(countVariable))
	delay, delayErr := time.ParseDuration(os.Getenv(delayVariable))
	err = errors.Join(err, delayErr)
	for i := range count {
		var s stub.Stub
		s, err = stub.New(&plugin{name: strconv.Itoa(i), delay: delay}, stub.WithPluginName("bench"), stub.WithPluginIdx(fmt.Sprintf("%02d", i)),
			stub.WithSocketPath(socket), stub.WithOnClose(func() {}))
		if err == nil {
			err = s.Start(context.Background())
		}
		if err != nil {
			break
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

// connect gives a runtime so many plugins, which take that long for a CreateContainer; done takes
// them away.
func (n *node) connect(t *testing.T, count int, delay time.Duration) (done func()) {
	t.Helper()
	if count == 0 {
		return func() {}
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), socketVariable+"="+n.nri, countVariable+"="+strconv.Itoa(count), delayVariable+"="+delay.String())
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for range count {
		if !lines.Scan() {
			t.Fatalf("%s: a plugin did not come up", n.name)
		}
	}
	return func() {
		_ = in.Close()
		_ = cmd.Wait()
	}
}
