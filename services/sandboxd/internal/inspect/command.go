package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/cli"
	kit "github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/config"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/inspect/rules"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/network"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// defaultWait is how long a finding must last to be reported.
const defaultWait = 3 * time.Second

// errFindings says that a check found something. The findings are printed already.
var errFindings = errors.New("findings")

// checkError is an error because of which nothing can be said about the state.
type checkError struct{ error }

func (e checkError) Unwrap() error { return e.error }

// ExitCode is the exit status of the process for the error of a command: 0 for none, 1 for
// findings and for the errors of other commands, 2 if a check could not be made.
func ExitCode(err error) int {
	var failed checkError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &failed):
		return 2
	default:
		return 1
	}
}

// Commands are the subcommands of this package: check-state and ps. cni is how the process
// itself understands the configuration of networks.
func Commands(cni func(config.Config) network.Config) []cli.Command {
	return []cli.Command{
		{
			Name: "check-state", Summary: "compare records and machine; exit status 1 if something is wrong",
			Run: func(ctx context.Context, args []string, stdout, stderr io.Writer) error {
				return checkState(ctx, args, stdout, stderr, cni)
			},
		},
		{Name: "ps", Summary: "list pods, containers and shims", Run: ps},
	}
}

func checkState(ctx context.Context, args []string, stdout, stderr io.Writer, cni func(config.Config) network.Config) error {
	wait, networks := defaultWait, false
	cfg, asJSON, err := parse("check-state", args, stderr, func(f *flag.FlagSet) {
		f.DurationVar(&wait, "wait", wait, "report only what stays wrong for `DURATION`, since a running sandboxd changes things")
		f.BoolVar(&networks, "network", false, "also ask the CNI plugins of all pods whether what they made is still there (CHECK)")
	})
	if errors.Is(err, flag.ErrHelp) {
		return err
	}
	if err != nil {
		return checkError{err}
	}
	found, err := Check(ctx, cfg, wait)
	if err == nil && networks {
		var more []rules.Finding
		more, err = CheckNetworks(ctx, cfg.Root, cni(cfg))
		found = append(found, more...)
	}
	if err != nil {
		return checkError{fmt.Errorf("check state: %w", err)}
	}
	err = printFindings(stdout, found, asJSON)
	if err != nil {
		return checkError{err}
	}
	if len(found) > 0 {
		return fmt.Errorf("check state: %d %w", len(found), errFindings)
	}
	return nil
}

func printFindings(w io.Writer, found []rules.Finding, asJSON bool) error {
	if asJSON {
		return printJSON(w, map[string]any{"findings": append([]rules.Finding{}, found...)})
	}
	for _, f := range found {
		fmt.Fprintln(w, f)
	}
	if len(found) == 0 {
		fmt.Fprintln(w, "records and machine agree")
	}
	return nil
}

func ps(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	cfg, asJSON, err := parse("ps", args, stderr, nil)
	if err != nil {
		return err
	}
	pods, err := Pods(ctx, cfg)
	if err != nil {
		return fmt.Errorf("list pods: %w", err)
	}
	if asJSON {
		return printJSON(stdout, map[string]any{"pods": pods})
	}
	return printPods(stdout, pods)
}

func printPods(w io.Writer, pods []Pod) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "ID\tNAME\tSTATE\tPID\tCONNECTION\tRSS\tPSS")
	for _, p := range pods {
		fmt.Fprintf(t, "%s\t%s/%s\t%s\t%d\t%s\t%s\t%s\n", pod.ShortID(p.ID), p.Namespace, p.Name, p.State,
			p.Shim.Pid, p.Shim.Connection, mebibytes(p.Shim.RSS), mebibytes(p.Shim.PSS))
		for _, c := range p.Containers {
			fmt.Fprintf(t, "  %s\t  %s\t%s\t%d\t\t\t\n", pod.ShortID(c.ID), c.Name, c.State, c.Pid)
		}
	}
	return t.Flush()
}

func mebibytes(n int64) string { return fmt.Sprintf("%.1fMiB", float64(n)/(1<<20)) }

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// parse reads the flags that all commands have and the configuration: the file that
// --config names, else the default file if there is one.
func parse(command string, args []string, stderr io.Writer, more func(*flag.FlagSet)) (cfg config.Config, asJSON bool, err error) {
	cfg = config.Default()
	path := cli.DefaultPath("sandboxd")
	flags := flag.NewFlagSet("sandboxd "+command, flag.ContinueOnError)
	flags.SetOutput(stderr)
	named := flags.String("config", "", "configuration `FILE` (default "+path+" if it exists)")
	flags.BoolVar(&asJSON, "json", false, "print JSON")
	if more != nil {
		more(flags)
	}
	err = flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return cfg, asJSON, err
	case err != nil:
		return cfg, asJSON, fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	case flags.NArg() > 0:
		return cfg, asJSON, fmt.Errorf("argument %q is not expected: %w", flags.Arg(0), errdefs.ErrInvalidArgument)
	}
	return cfg, asJSON, kit.LoadEither(*named, path, &cfg)
}
