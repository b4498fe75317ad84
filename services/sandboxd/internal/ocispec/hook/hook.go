// Package hook adds hooks that the node has for containers to their specifications, by
// descriptions in folders in the form of oci-hooks(5), version 1.0.0.
//
// Folders are read for each container, so that a change is in force at once. A description that
// is wrong is an error, because a hook that silently does not run may be one that somebody relies
// on. The package runs no hook and keeps no state.
package hook

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// version is that of the form of descriptions.
const version = "1.0.0"

// Container is what hooks are chosen by, besides the command.
type Container struct {
	// Annotations are those of the container and its pod.
	Annotations map[string]string
	// BindMounts says that the container asks for mounts of the node.
	BindMounts bool
}

// Hook is a description.
type Hook struct {
	Hook   specs.Hook `json:"hook"`
	When   When       `json:"when"`
	Stages []string   `json:"stages"`
	// Version must be "1.0.0".
	Version string `json:"version"`
}

// When says for which containers a hook is: those for which all hold that are set.
type When struct {
	Always        *bool             `json:"always"`
	Annotations   map[string]string `json:"annotations"`
	Commands      []string          `json:"commands"`
	HasBindMounts *bool             `json:"hasBindMounts"`

	annotations []pair
	commands    []*regexp.Regexp
}

// pair matches the name and the value of an annotation.
type pair struct{ name, value *regexp.Regexp }

// Set adds the hooks that are for a container to its specification, behind those that it has.
// Errors: ErrFailedPrecondition with the file for a description that is wrong.
func Set(spec *specs.Spec, folders []string, c Container) error {
	hooks, err := Read(folders)
	if err != nil {
		return err
	}
	for _, h := range hooks {
		if !h.When.matches(spec.Process, c) {
			continue
		}
		if spec.Hooks == nil {
			spec.Hooks = &specs.Hooks{}
		}
		for _, stage := range h.Stages {
			list := listOf(spec.Hooks, stage)
			*list = append(*list, h.Hook)
		}
	}
	return nil
}

// Read reads the descriptions in the order in which their hooks run. One in a later folder stands
// for one of the same file name in an earlier one. A folder that is not there has none. Errors: as [Set],
// of all descriptions that are wrong.
func Read(folders []string) ([]Hook, error) {
	files := map[string]string{}
	for _, folder := range folders {
		entries, err := os.ReadDir(folder)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("folder of hooks: %w: %w", err, errdefs.ErrFailedPrecondition)
		}
		for _, e := range entries {
			if filepath.Ext(e.Name()) == ".json" {
				files[e.Name()] = filepath.Join(folder, e.Name())
			}
		}
	}
	names := slices.SortedFunc(maps.Keys(files), func(a, b string) int {
		return cmp.Or(strings.Compare(strings.ToLower(a), strings.ToLower(b)), strings.Compare(a, b))
	})
	var out []Hook
	var errs []error
	for _, name := range names {
		h, err := readFile(files[name])
		if err != nil {
			errs = append(errs, fmt.Errorf("hook %s: %w: %w", files[name], err, errdefs.ErrFailedPrecondition))
		}
		out = append(out, h)
	}
	return out, errors.Join(errs...)
}

func readFile(file string) (Hook, error) {
	var h Hook
	st, err := os.Stat(file)
	if err == nil && !st.Mode().IsRegular() {
		err = errors.New("is no file")
	}
	if err != nil {
		return h, err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return h, err
	}
	in := json.NewDecoder(bytes.NewReader(text))
	in.DisallowUnknownFields()
	if err := in.Decode(&h); err != nil {
		return h, fmt.Errorf("is no description of version %s: %w", version, err)
	}
	return h, errors.Join(h.check(), h.When.compile())
}

// check refuses what could not run.
func (h *Hook) check() error {
	if h.Version != version {
		return fmt.Errorf("version %q: only %q is known", h.Version, version)
	}
	if !filepath.IsAbs(h.Hook.Path) {
		return fmt.Errorf("hook.path %q: must begin with /", h.Hook.Path)
	}
	if st, err := os.Stat(h.Hook.Path); err != nil || st.IsDir() {
		return fmt.Errorf("hook.path %q: there is no such program", h.Hook.Path)
	}
	for _, variable := range h.Hook.Env {
		if name, _, ok := strings.Cut(variable, "="); !ok || name == "" {
			return fmt.Errorf("hook.env: %q is no variable, write NAME=value", variable)
		}
	}
	if h.Hook.Timeout != nil && *h.Hook.Timeout <= 0 {
		return fmt.Errorf("hook.timeout %d: must be positive", *h.Hook.Timeout)
	}
	if len(h.Stages) == 0 {
		return errors.New("stages: must name one")
	}
	for _, stage := range h.Stages {
		if listOf(&specs.Hooks{}, stage) == nil {
			return fmt.Errorf("stages: %q is unknown", stage)
		}
	}
	return nil
}

func (w *When) compile() error {
	if w.Always == nil && w.HasBindMounts == nil && len(w.Annotations) == 0 && len(w.Commands) == 0 {
		return errors.New("when: must have a condition, for example \"always\": true")
	}
	for name, value := range w.Annotations {
		n, err := regexp.Compile(name)
		if err != nil {
			return fmt.Errorf("when.annotations: %w", err)
		}
		v, err := regexp.Compile(value)
		if err != nil {
			return fmt.Errorf("when.annotations: %w", err)
		}
		w.annotations = append(w.annotations, pair{n, v})
	}
	for _, command := range w.Commands {
		c, err := regexp.Compile(command)
		if err != nil {
			return fmt.Errorf("when.commands: %w", err)
		}
		w.commands = append(w.commands, c)
	}
	return nil
}

func (w *When) matches(p *specs.Process, c Container) bool {
	if w.Always != nil && !*w.Always {
		return false
	}
	if w.HasBindMounts != nil && (!*w.HasBindMounts || !c.BindMounts) {
		return false
	}
	for _, want := range w.annotations {
		found := false
		for name, value := range c.Annotations {
			found = found || (want.name.MatchString(name) && want.value.MatchString(value))
		}
		if !found {
			return false
		}
	}
	return len(w.commands) == 0 || slices.ContainsFunc(w.commands, func(r *regexp.Regexp) bool { return r.MatchString(p.Args[0]) })
}

// listOf is the list of a stage; nil if there is no such stage.
func listOf(h *specs.Hooks, stage string) *[]specs.Hook {
	switch stage {
	case "prestart":
		return &h.Prestart //nolint:staticcheck // out of use, but not out of the specification
	case "createRuntime":
		return &h.CreateRuntime
	case "createContainer":
		return &h.CreateContainer
	case "startContainer":
		return &h.StartContainer
	case "poststart":
		return &h.Poststart
	case "poststop":
		return &h.Poststop
	}
	return nil
}
