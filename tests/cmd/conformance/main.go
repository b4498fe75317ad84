// Command conformance runs critest, the conformance tests of the CRI, against
// the four processes in namespaces of their own, with images from the fixture.
//
// It prints the names of the failing specs and, as its last line, how many
// passed, failed and were skipped. With --handler it does so once for each runtime
// handler, as the default one of a system of its own; the last line then counts each
// spec once, by its worst outcome. The exit status is 1 if a spec that is wanted
// failed, or if nothing was run. With --endpoint it tests a runtime that runs
// already, which shows whether a finding is the runtime's or the fixture's.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/leak"
	"github.com/crisp-cri/crisp/tests/testenv"
)

type options struct {
	focus, skip, wanted string
	seed                int64
	endpoint, nriSocket string
	hostsDir            string
	handlers            []string // at least one; empty is the default of the program
	verbose, privileged bool
	allCgroups          bool
	extra               []string
}

var (
	errFailed = errors.New("wanted specs failed")
	errNoRun  = errors.New("no spec was run")
	errLeak   = errors.New("the run left something behind")

	errHandler = errors.New("--handler is for systems that are started here, not for --endpoint")
)

func main() {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(2)
	}
	work := func() int {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		if err := run(ctx, o, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "conformance:", err)
			return 1
		}
		return 0
	}
	status := 0
	switch {
	case err != nil:
	case o.endpoint != "":
		status = work() // where the runtime is, which has to reach the registry
	default:
		status, err = testenv.Isolate(context.Background(), work)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		status = 1
	}
	os.Exit(status)
}

func parse(args []string) (options, error) {
	var o options
	var handlers string
	flags := flag.NewFlagSet("conformance", flag.ContinueOnError)
	flags.StringVar(&o.focus, "focus", "", "run only specs that match this expression")
	flags.StringVar(&o.skip, "skip", "", "do not run specs that match this expression")
	flags.StringVar(&o.wanted, "wanted", "", "specs whose failure fails the run (default: all that were run)")
	flags.Int64Var(&o.seed, "seed", 1, "seed of the order of the specs")
	flags.StringVar(&o.endpoint, "endpoint", "", "test the runtime at this CRI address instead of starting one")
	flags.StringVar(&o.nriSocket, "nri-socket", "", "with --endpoint: the runtime's NRI socket")
	flags.StringVar(&o.hostsDir, "hosts-dir", "", "with --endpoint: folder of hosts.toml files that the runtime reads")
	flags.StringVar(&handlers, "handler", "", "runtime handlers, with commas between them, to run with one after the other (default: the configuration's default)")
	flags.BoolVar(&o.verbose, "v", false, "show critest's own output")
	flags.BoolVar(&o.privileged, "privileged", false, "run all four processes as root")
	flags.BoolVar(&o.allCgroups, "all-cgroups", false, "count every new cgroup of the machine as left behind; nothing else may run containers meanwhile")
	err := flags.Parse(args)
	o.extra = flags.Args()
	o.handlers = strings.Split(handlers, ",")
	if err == nil && handlers != "" && o.endpoint != "" {
		err = errHandler
	}
	return o, err
}

func run(ctx context.Context, o options, out io.Writer) error {
	wanted, err := regexp.Compile(o.wanted)
	if err != nil {
		return fmt.Errorf("--wanted: %w", err)
	}
	parts, err := fixture.FindParts(ctx, fixture.PartsConfig{})
	if err != nil {
		return err
	}
	images, err := fixture.Conformance(parts)
	if err != nil {
		return err
	}
	if o.endpoint != "" {
		specs, err := testRunning(ctx, o, images, out)
		return errors.Join(err, conclude(specs, wanted, o.verbose, out))
	}
	var runs [][]spec
	var problems []error
	for _, handler := range o.handlers {
		if handler != "" {
			fmt.Fprintf(out, "with handler %s:\n", handler)
		}
		specs, err := testOwn(ctx, o, handler, images, out)
		runs = append(runs, specs)
		problems = append(problems, err, conclude(specs, wanted, o.verbose, out))
	}
	if len(runs) > 1 {
		fmt.Fprintf(out, "with all of %s:\n%s\n", strings.Join(o.handlers, ", "), summary(worst(runs)))
	}
	return errors.Join(problems...)
}

// testOwn starts the four processes with a default handler and tests them.
func testOwn(ctx context.Context, o options, handler string, images []fixture.Image, out io.Writer) ([]spec, error) {
	system, err := testenv.Launch(ctx, testenv.Setup{Images: images, Handler: handler, Privileged: o.privileged, AllCgroups: o.allCgroups})
	if err != nil {
		return nil, err
	}
	o.endpoint, o.nriSocket = "unix://"+system.Socket(), system.NRISocket()
	specs, err := critest(ctx, o, system.Registry, out)
	if o.verbose {
		system.WriteLogs(out)
	}
	leaked, closeErr := system.Close(context.WithoutCancel(ctx))
	if len(leaked) > 0 {
		fmt.Fprintln(out, leak.Report(leaked))
		closeErr = errors.Join(closeErr, errLeak)
	}
	return specs, errors.Join(err, closeErr, system.RemoveFolder())
}

// testRunning tests the runtime at o.endpoint.
func testRunning(ctx context.Context, o options, images []fixture.Image, out io.Writer) ([]spec, error) {
	registry, err := fixture.Serve(ctx, fixture.Config{}, images)
	if err != nil {
		return nil, err
	}
	if o.hostsDir != "" {
		err = fixture.WriteHosts(o.hostsDir, registry.Addr())
	}
	var specs []spec
	if err == nil {
		specs, err = critest(ctx, o, registry, out)
	}
	return specs, errors.Join(err, registry.Close())
}

// conclude prints the result and judges it.
func conclude(specs []spec, wanted *regexp.Regexp, verbose bool, out io.Writer) error {
	var bad, ran int
	for _, s := range specs {
		if s.outcome() != "skipped" {
			ran++
		}
		if s.outcome() == "skipped" && verbose {
			fmt.Fprintf(out, "skipped: %s\n    %s\n", s.name(), s.reason())
		}
		if s.outcome() != "failed" {
			continue
		}
		mark := ""
		if wanted.MatchString(s.name()) {
			bad++
		} else {
			mark = " (not wanted)"
		}
		fmt.Fprintf(out, "FAILED%s: %s\n    %s\n", mark, s.name(), s.reason())
	}
	fmt.Fprintln(out, summary(specs))
	switch {
	case bad > 0:
		return fmt.Errorf("%d: %w", bad, errFailed)
	case ran == 0:
		return errNoRun
	}
	return nil
}

// summary counts the outcomes.
func summary(specs []spec) string {
	count := map[string]int{}
	for _, s := range specs {
		count[s.outcome()]++
	}
	return fmt.Sprintf("%d passed, %d failed, %d skipped", count["passed"], count["failed"], count["skipped"])
}

// worst has each spec of several runs once: failed if it failed in one of them, else
// skipped if it was skipped in one.
func worst(runs [][]spec) []spec {
	rank := map[string]int{"passed": 0, "skipped": 1, "failed": 2}
	at := map[string]int{}
	var out []spec
	for _, s := range slices.Concat(runs...) {
		i, known := at[s.name()]
		switch {
		case !known:
			at[s.name()] = len(out)
			out = append(out, s)
		case rank[s.outcome()] > rank[out[i].outcome()]:
			out[i] = s
		}
	}
	return out
}
