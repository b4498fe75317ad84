package hook

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
)

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// named is a description of a hook that is told by its argument.
func named(name, when string, stages string) string {
	return `{"version":"1.0.0","hook":{"path":"/bin/sh","args":["` + name + `"]},"when":` + when + `,"stages":[` + stages + `]}`
}

func TestSet(t *testing.T) {
	t.Parallel()
	low, high := t.TempDir(), t.TempDir()
	always := `{"always":true}`
	write(t, low, "10-A.json", named("10-A", always, `"prestart","poststop"`))
	write(t, low, "05-masked.json", named("masked", always, `"prestart"`))
	write(t, high, "05-masked.json", named("05", always, `"prestart"`))
	write(t, high, "07-never.json", named("never", `{"always":false}`, `"prestart"`))
	write(t, high, "08-other.txt", "no description")
	write(t, high, "20-all.json", named("20", `{"annotations":{"^team$":"^a.*"},"commands":["/app$","/none$"],"hasBindMounts":true}`, `"createRuntime","createContainer","startContainer","poststart"`))
	for _, tt := range []struct {
		name, command string
		c             Container
		wantRuntime   []string
	}{
		{"all", "/bin/app", Container{map[string]string{"x": "y", "team": "abc"}, true}, []string{"of base", "20"}},
		{"another command", "/bin/app2", Container{map[string]string{"team": "abc"}, true}, []string{"of base"}},
		{"another value", "/bin/app", Container{map[string]string{"team": "b", "x": "abc"}, true}, []string{"of base"}},
		{"no mounts", "/bin/app", Container{map[string]string{"team": "abc"}, false}, []string{"of base"}},
	} {
		spec := &specs.Spec{
			Process: &specs.Process{Args: []string{tt.command}},
			Hooks:   &specs.Hooks{CreateRuntime: []specs.Hook{{Args: []string{"of base"}}}},
		}
		if err := Set(spec, []string{low, filepath.Join(low, "absent"), high}, tt.c); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"05", "10-A"}, args(*listOf(spec.Hooks, "prestart"))); diff != "" {
			t.Errorf("%s: prestart (-want +got):\n%s", tt.name, diff)
		}
		if diff := cmp.Diff(tt.wantRuntime, args(spec.Hooks.CreateRuntime)); diff != "" {
			t.Errorf("%s: createRuntime (-want +got):\n%s", tt.name, diff)
		}
		if n := len(tt.wantRuntime) - 1; len(spec.Hooks.CreateContainer) != n || len(spec.Hooks.StartContainer) != n || len(spec.Hooks.Poststart) != n || len(spec.Hooks.Poststop) != 1 {
			t.Errorf("%s: hooks %+v", tt.name, spec.Hooks)
		}
	}
}

func args(hooks []specs.Hook) []string {
	var out []string
	for _, h := range hooks {
		out = append(out, h.Args[0])
	}
	return out
}

func TestWrongDescriptionsAreNamed(t *testing.T) {
	t.Parallel()
	for want, text := range map[string]string{
		"no description":   `{"version":`,
		"arguments":        `{"hook":{"path":"/bin/sh"},"arguments":["x"]}`,
		`version "0.1.0"`:  `{"version":"0.1.0"}`,
		"must begin with":  `{"version":"1.0.0","hook":{"path":"sh"}}`,
		"no such program":  `{"version":"1.0.0","hook":{"path":"/bin"},"when":{"always":true},"stages":["prestart"]}`,
		"hook.env":         `{"version":"1.0.0","hook":{"path":"/bin/sh","env":["A"]},"when":{"always":true},"stages":["prestart"]}`,
		"hook.timeout":     `{"version":"1.0.0","hook":{"path":"/bin/sh","timeout":0},"when":{"always":true},"stages":["prestart"]}`,
		"must name one":    `{"version":"1.0.0","hook":{"path":"/bin/sh"},"when":{"always":true}}`,
		`"never" is`:       `{"version":"1.0.0","hook":{"path":"/bin/sh"},"when":{"always":true},"stages":["never"]}`,
		"have a condition": `{"version":"1.0.0","hook":{"path":"/bin/sh"},"stages":["prestart"]}`,
		"when.commands":    named("x", `{"commands":["["]}`, `"prestart"`),
		"when.annotations": named("x", `{"annotations":{"a":"["}}`, `"prestart"`),
	} {
		dir := t.TempDir()
		write(t, dir, "50-wrong.json", text)
		write(t, dir, "60-right.json", named("right", `{"always":true}`, `"prestart"`))
		spec := &specs.Spec{Process: &specs.Process{Args: []string{"a"}}}
		err := Set(spec, []string{dir}, Container{})
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "50-wrong.json") {
			t.Errorf("%s: %v", want, err)
		}
		if spec.Hooks != nil {
			t.Errorf("%s: hooks %+v", want, spec.Hooks)
		}
	}
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "a.json"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Read([]string{dir}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a folder in place of a file: %v", err)
	}
}
