package app_test

import (
	"context"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	hubconfig "github.com/crisp-cri/crisp/services/nri-hub/internal/config"
)

// validator is a plugin that validates as the test wants it.
type validator func(ctx context.Context, req *nri.ValidateContainerAdjustmentRequest) error

func (v validator) ValidateContainerAdjustment(ctx context.Context, req *nri.ValidateContainerAdjustmentRequest) error {
	return v(ctx, req)
}

func (h *hubProcess) validates(index, name string, v validator, opts ...stub.Option) {
	h.t.Helper()
	s, err := stub.New(v, append([]stub.Option{
		stub.WithPluginName(name), stub.WithPluginIdx(index), stub.WithLogger(silent{}),
		stub.WithSocketPath(h.cfg.NRI.Socket.Path), stub.WithOnClose(func() {}),
	}, opts...)...)
	if err == nil {
		err = s.Start(context.Background())
	}
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(s.Stop)
}

// Plugins that validate are asked side by side.
func TestValidatorsWorkSideBySide(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	var asked sync.WaitGroup
	asked.Add(3)
	for _, name := range []string{"a", "b", "c"} {
		h.validates("10", name, func(ctx context.Context, _ *nri.ValidateContainerAdjustmentRequest) error {
			asked.Done()
			all := make(chan struct{})
			go func() { asked.Wait(); close(all) }()
			select {
			case <-all:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}
	g.await(t, "10-a", "10-b", "10-c")
	if _, err := g.create(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
}

// A validator that does not answer refuses, whatever its policy: when its time is up, at once as
// long as it is degraded, and when its connection breaks. One that only observes refuses nothing.
func TestValidatorsThatDoNotAnswer(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	const limit = 3 * time.Second
	cfg.Plugins = []hubconfig.Plugin{hanging("hangs", limit), {Name: "watches", ObserveOnly: true}}
	h := startHub(t, cfg)
	g := h.connect()
	refused := func(err error, who string) {
		t.Helper()
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "refused by plugin "+who) {
			t.Errorf("error is %v, want a refusal by %s", err, who)
		}
	}
	h.validates("30", "watches", func(context.Context, *nri.ValidateContainerAdjustmentRequest) error { return errNo })
	g.await(t, "30-watches")
	if _, err := g.create(t.Context(), "c1"); err != nil {
		t.Errorf("a plugin that only observes refuses: %v", err)
	}

	var hang atomic.Bool
	hang.Store(true)
	release := make(chan struct{})
	h.validates("10", "hangs", func(context.Context, *nri.ValidateContainerAdjustmentRequest) error {
		if hang.Load() {
			<-release
		}
		return nil
	}, withPolicy(false, true))
	g.await(t, "10-hangs", "30-watches")
	_, err := g.create(t.Context(), "c2")
	refused(err, "10-hangs")
	begin := time.Now()
	_, err = g.create(t.Context(), "c3")
	refused(err, "10-hangs")
	if took := time.Since(begin); took >= limit {
		t.Errorf("a degraded validator was waited for: %v", took)
	}
	hang.Store(false)
	close(release)
	testkit.Eventually(t, patience, func() error { _, err := g.create(t.Context(), "c4"); return err })

	var conn net.Conn
	h.validates("20", "breaks", func(context.Context, *nri.ValidateContainerAdjustmentRequest) error { return conn.Close() },
		h.tapped(&conn), withPolicy(false, true))
	g.await(t, "10-hangs", "20-breaks", "30-watches")
	_, err = g.create(t.Context(), "c5")
	refused(err, "20-breaks")
	g.await(t, "10-hangs", "30-watches")
	if _, err := g.create(t.Context(), "c6"); err != nil {
		t.Errorf("after it has gone: %v", err)
	}
}

// Each option of NRI's own validator refuses what it is for, and nothing else.
func TestOptionsOfTheDefaultValidator(t *testing.T) {
	t.Parallel()
	seccomp := func(a *nri.ContainerAdjustment) {
		a.SetLinuxSeccompPolicy(&nri.LinuxSeccomp{DefaultAction: "SCMP_ACT_ALLOW"})
	}
	profile := func(p nri.SecurityProfile_ProfileType) *nri.LinuxContainer {
		return &nri.LinuxContainer{SeccompProfile: &nri.SecurityProfile{ProfileType: p, LocalhostRef: "own"}}
	}
	tests := map[string]struct {
		enable func(*hubconfig.Config)
		adjust func(*nri.ContainerAdjustment)
		linux  *nri.LinuxContainer
	}{
		"hooks": {
			func(c *hubconfig.Config) { c.Validator.RejectOCIHookAdjustment = true },
			func(a *nri.ContainerAdjustment) { a.AddHooks(&nri.Hooks{Poststop: []*nri.Hook{{Path: "/h"}}}) }, nil,
		},
		"namespaces": {
			func(c *hubconfig.Config) { c.Validator.RejectNamespaceAdjustment = true },
			func(a *nri.ContainerAdjustment) { a.AddOrReplaceNamespace(&nri.LinuxNamespace{Type: "uts"}) }, nil,
		},
		"sysctl": {
			func(c *hubconfig.Config) { c.Validator.RejectSysctlAdjustment = true },
			func(a *nri.ContainerAdjustment) { a.SetLinuxSysctl("net.core.somaxconn", "1") }, nil,
		},
		"default seccomp profile": {
			func(c *hubconfig.Config) { c.Validator.RejectRuntimeDefaultSeccompAdjustment = true }, seccomp,
			profile(nri.SecurityProfile_RUNTIME_DEFAULT),
		},
		"no seccomp profile": {
			func(c *hubconfig.Config) { c.Validator.RejectUnconfinedSeccompAdjustment = true }, seccomp,
			profile(nri.SecurityProfile_UNCONFINED),
		},
		"own seccomp profile": {
			func(c *hubconfig.Config) { c.Validator.RejectCustomSeccompAdjustment = true }, seccomp,
			profile(nri.SecurityProfile_LOCALHOST),
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, enabled := range []bool{false, true} {
				cfg := testConfig(t)
				cfg.Validator.Enable = true
				for other, o := range tests {
					if (other == name) == enabled {
						o.enable(&cfg)
					}
				}
				h := startHub(t, cfg)
				g := h.connect()
				h.mustStart("10", "p", &recorder{onCreate: answers(func() *nri.ContainerAdjustment {
					a := &nri.ContainerAdjustment{}
					tt.adjust(a)
					return a
				})})
				g.await(t, "10-p")
				c := container("c1")
				c.Linux = tt.linux
				_, err := g.CreateContainer(t.Context(), createRequest(g, c))
				switch {
				case !enabled && err != nil:
					t.Errorf("with all other options: %v", err)
				case enabled && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "10-p") || !strings.Contains(err.Error(), "default validator")):
					t.Errorf("error is %v", err)
				}
			}
		})
	}
}

// Plugins that NRI's own validator requires are not missed where an annotation says so.
func TestDefaultValidatorToleratesMissingPlugins(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Validator.Enable = true
	cfg.Validator.RequiredPlugins = []string{"absent"}
	cfg.Validator.TolerateMissingAnnotation = "tolerate"
	h := startHub(t, cfg)
	g := h.connect()
	tolerant := podIn("default", "p1", nil)
	tolerant.Annotations = map[string]string{"tolerate": "true"}
	if _, err := g.createIn(t.Context(), tolerant, "c1"); err != nil {
		t.Error(err)
	}
	if _, err := g.createIn(t.Context(), podIn("default", "p2", nil), "c2"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "absent") {
		t.Errorf("without the annotation: %v", err)
	}
}
