package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/testenv"
)

// spec is one entry of ginkgo's JSON report.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeType            string
	LeafNodeText            string
	State                   string
	Failure                 struct {
		Message  string
		Location struct {
			FileName   string
			LineNumber int
		}
	}
}

func (s spec) name() string {
	return strings.Join(append(append([]string(nil), s.ContainerHierarchyTexts...), s.LeafNodeText), " ")
}

func (s spec) outcome() string {
	switch s.State {
	case "passed", "skipped":
		return s.State
	case "pending":
		return "skipped"
	default:
		return "failed"
	}
}

// notSelected tells a spec that focus, skip or its suite left out from one that
// skipped itself, which gives a reason.
func (s spec) notSelected() bool { return s.State == "skipped" && s.Failure.Message == "" }

func (s spec) reason() string {
	const most = 4000
	text := strings.Join(strings.Fields(s.Failure.Message), " ")
	if len(text) > most {
		text = text[:most] + " …"
	}
	return fmt.Sprintf("%s:%d: %s", filepath.Base(s.Failure.Location.FileName), s.Failure.Location.LineNumber, text)
}

var errNoDigest = errors.New("critest holds no reference to an image by digest")

// critest runs the conformance program and gives all specs that were selected, those that
// stream once for each transport.
func critest(ctx context.Context, o options, registry *fixture.Registry, out io.Writer) ([]spec, error) {
	work, err := os.MkdirTemp("", "critest-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(work) }()
	program, err := patched(ctx, work, registry)
	if err != nil {
		return nil, err
	}
	specs, err := runOnce(ctx, o, program, work, out)
	if err != nil {
		return nil, err
	}
	again := slices.DeleteFunc(slices.Clone(specs), func(s spec) bool {
		return s.outcome() == "skipped" || !slices.Contains(s.ContainerHierarchyTexts, streamingSpecs)
	})
	if len(again) == 0 {
		return specs, nil
	}
	other, err := runOnce(ctx, overWebSocket(o, again), program, work, out)
	for _, s := range other {
		s.LeafNodeText += " [WebSocket]"
		specs = append(specs, s)
	}
	return specs, err
}

// streamingSpecs is the group of the specs that stream. critest runs them over SPDY unless it
// is told otherwise, so they are run a second time.
const streamingSpecs = "[k8s.io] Streaming"

func overWebSocket(o options, specs []spec) options {
	var names []string
	for _, s := range specs {
		names = append(names, regexp.QuoteMeta(s.name()))
	}
	o.focus = strings.Join(names, "|")
	o.extra = append(slices.Clone(o.extra), "-websocket-exec", "-websocket-attach", "-websocket-portforward")
	return o
}

// runOnce runs the selected specs.
func runOnce(ctx context.Context, o options, program, work string, out io.Writer) ([]spec, error) {
	report := filepath.Join(work, "report.json")
	args := []string{
		"-config", "/dev/null", "-runtime-endpoint", o.endpoint, "-image-endpoint", o.endpoint,
		"-ginkgo.no-color", "-ginkgo.json-report", report, "-ginkgo.seed", strconv.FormatInt(o.seed, 10),
	}
	if o.nriSocket != "" {
		args = append(args, "-nri-socket", o.nriSocket)
	}
	if o.focus != "" {
		args = append(args, "-ginkgo.focus", o.focus)
	}
	if o.skip != "" {
		args = append(args, "-ginkgo.skip", o.skip)
	}
	cmd := exec.CommandContext(ctx, program, append(args, o.extra...)...)
	cmd.Dir = work
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if o.verbose {
		cmd.Stdout, cmd.Stderr = out, out
	}
	runErr := cmd.Run()
	specs, err := readReport(report)
	if err != nil {
		return nil, errors.Join(runErr, err, errors.New(output.String()))
	}
	return specs, nil // A failing spec makes the program fail; the report says which.
}

// patched copies critest with its one digest reference changed to the digest of
// the image of that name in the fixture: the original image cannot be had offline.
func patched(ctx context.Context, dir string, registry *fixture.Registry) (string, error) {
	path, err := testenv.Binary("critest")
	if err != nil {
		return "", err
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	digest, err := registry.Digest(ctx, fixture.DigestImage)
	if err != nil {
		return "", err
	}
	// The windows image's name ends in the same way, hence the whole name.
	reference := regexp.MustCompile(regexp.QuoteMeta(fixture.DigestImage) + `@sha256:[0-9a-f]{64}`)
	old := reference.Find(data)
	if old == nil {
		return "", errNoDigest
	}
	changed := filepath.Join(dir, "critest")
	data = bytes.ReplaceAll(data, old, []byte(fixture.DigestImage+"@"+digest.String()))
	return changed, os.WriteFile(changed, data, 0o755)
}

func readReport(path string) ([]spec, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var suites []struct{ SpecReports []spec }
	if err := json.Unmarshal(data, &suites); err != nil {
		return nil, fmt.Errorf("read report: %w", err)
	}
	var specs []spec
	for _, suite := range suites {
		for _, s := range suite.SpecReports {
			// Set-up and tear-down nodes are listed too; they count only when they fail.
			counts := s.LeafNodeType == "It" || s.outcome() == "failed"
			if counts && !s.notSelected() {
				specs = append(specs, s)
			}
		}
	}
	return specs, nil
}
