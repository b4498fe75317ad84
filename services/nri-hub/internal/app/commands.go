package app

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/internal/cli"
	kit "github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/config"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/podspec"
)

// commandTime bounds a question to the running hub. A dry run may take the time limits of
// all plugins.
const commandTime = time.Minute

// Program describes nri-hub for its main.
func Program() cli.Program[config.Config] {
	return cli.Program[config.Config]{
		Name: "nri-hub", Default: config.Default, Run: Run, Admin: func(c config.Config) string { return c.Admin.Listen },
		Extra: []cli.Command{
			{Name: "plugins", Summary: "list the plugins; \"plugins inspect NAME\" tells all of one", Run: pluginsCommand},
			{Name: "dry-run", Summary: "show what the plugins would make of a pod's manifest", Run: dryRunCommand},
		},
	}
}

// options are what all commands take.
type options struct {
	flags  *flag.FlagSet
	config *string
	socket *string
	json   *bool
}

func newOptions(command string, stderr io.Writer) options {
	f := flag.NewFlagSet("nri-hub "+command, flag.ContinueOnError)
	f.SetOutput(stderr)
	return options{
		flags:  f,
		config: f.String("config", "", "configuration `FILE` of the running hub (default "+cli.DefaultPath("nri-hub")+" if it exists)"),
		socket: f.String("socket", "", "`PATH` of the hub's socket, instead of that of the configuration"),
		json:   f.Bool("json", false, "print JSON"),
	}
}

// parse takes flags before and after the other arguments, which it returns.
func (o options) parse(args []string) ([]string, error) {
	var rest []string
	for {
		if err := o.flags.Parse(args); err != nil {
			if errors.Is(err, flag.ErrHelp) {
				return nil, err
			}
			return nil, fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
		}
		args = o.flags.Args()
		if len(args) == 0 {
			return rest, nil
		}
		rest, args = append(rest, args[0]), args[1:]
	}
}

// ask calls use with a client of the running hub.
func (o options) ask(ctx context.Context, stderr io.Writer, use func(ctx context.Context, hub nriv1.HubServiceClient) error) error {
	socket := *o.socket
	if socket == "" {
		cfg := config.Default()
		if err := kit.LoadEither(*o.config, cli.DefaultPath("nri-hub"), &cfg); err != nil {
			return err
		}
		socket = cfg.Server.Socket.Path
	}
	if _, err := os.Stat(socket); err != nil {
		return fmt.Errorf("no hub is running here: %w", err)
	}
	tel, err := telemetry.New(ctx, telemetry.Config{
		Service: "nri-hub", Log: telemetry.LogConfig{Level: "error", Format: "text"}, Trace: telemetry.DefaultTraceConfig(),
	}, stderr)
	if err != nil {
		return err
	}
	conn, err := rpc.Dial(rpc.DefaultClientConfig(socket), tel)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	return errors.Join(use(ctx, nriv1.NewHubServiceClient(conn)), conn.Close())
}

func printJSON(w io.Writer, m proto.Message) error {
	text, err := protojson.MarshalOptions{Multiline: true, UseProtoNames: true}.Marshal(m)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(w, string(text))
	return err
}

func pluginsCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o := newOptions("plugins [inspect NAME]", stderr)
	rest, err := o.parse(args)
	if err != nil {
		return err
	}
	name := ""
	switch {
	case len(rest) == 2 && rest[0] == "inspect":
		name = rest[1]
	case len(rest) != 0:
		return fmt.Errorf("plugins wants nothing or \"inspect NAME\", not %q: %w", strings.Join(rest, " "), errdefs.ErrInvalidArgument)
	}
	return o.ask(ctx, stderr, func(ctx context.Context, hub nriv1.HubServiceClient) error {
		st, err := hub.GetStatus(ctx, &nriv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		if name != "" {
			return inspect(stdout, st, name, *o.json)
		}
		if *o.json {
			return printJSON(stdout, st)
		}
		return list(stdout, st)
	})
}

func list(w io.Writer, st *nriv1.GetStatusResponse) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "PLUGIN\tSTATE\tKIND\tNRI\tPID\tCALLS\tFAILED\tMEAN\tMAX\tQUEUED\tKEPT\tLAST ERROR")
	for _, p := range st.GetPlugins() {
		fmt.Fprintf(t, "%s-%s\t%s\t%s\t%s\t%d\t%d\t%d\t%s\t%s\t%d\t%d\t%s\n",
			p.GetIndex(), p.GetName(), p.GetState(), p.GetKind(), cmp.Or(p.GetNriVersion(), "-"), p.GetPid(), p.GetCalls(), p.GetFailures(),
			short(p.GetMeanLatencyNano()), short(p.GetMaxLatencyNano()), p.GetQueued(), p.GetKept(), cmp.Or(p.GetLastError(), "-"))
	}
	return t.Flush()
}

func short(nano int64) time.Duration { return time.Duration(nano).Round(10 * time.Microsecond) }

func inspect(w io.Writer, st *nriv1.GetStatusResponse, name string, asJSON bool) error {
	found := false
	for _, p := range st.GetPlugins() {
		full := p.GetIndex() + "-" + p.GetName()
		if name != full && name != p.GetName() {
			continue
		}
		found = true
		if asJSON {
			if err := printJSON(w, p); err != nil {
				return err
			}
			continue
		}
		if err := describe(w, full, p); err != nil {
			return err
		}
	}
	if !found {
		return fmt.Errorf("plugin %q: the hub has none of that name: %w", name, errdefs.ErrNotFound)
	}
	return nil
}

func describe(w io.Writer, full string, p *nriv1.PluginStatus) error {
	policy := "none of its own"
	if p.FailRequest != nil {
		policy = fmt.Sprintf("fail_request=%v keep_connected=%v", p.GetFailRequest(), p.GetKeepConnected())
	}
	var events []string
	for e := nri.Event_UNKNOWN + 1; e < nri.Event_LAST; e++ {
		if mask := nri.EventMask(p.GetEvents()); mask.IsSet(e) {
			events = append(events, e.PrettyName())
		}
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, line := range [][2]string{
		{"plugin", full},
		{"state", p.GetState()},
		{"kind", p.GetKind()},
		{"since", time.Unix(0, p.GetSinceUnixNano()).Format(time.RFC3339)},
		{"nri version", cmp.Or(p.GetNriVersion(), "not told")},
		{"process", fmt.Sprintf("%d, user %d, group %d", p.GetPid(), p.GetUid(), p.GetGid())},
		{"program", cmp.Or(p.GetExecutable(), "not known")},
		{"events", strings.Join(events, " ")},
		{"failure policy", policy},
		{"rule", cmp.Or(strings.Join(p.GetRule(), "; "), "none")},
		{"calls", fmt.Sprintf("%d answered, %d failed", p.GetCalls(), p.GetFailures())},
		{"latency", fmt.Sprintf("mean %s, max %s", short(p.GetMeanLatencyNano()), short(p.GetMaxLatencyNano()))},
		{"waiting", fmt.Sprintf("%d requests queued, %d events kept, %d answers overdue", p.GetQueued(), p.GetKept(), p.GetOverdue())},
		{"objects", strconv.FormatUint(uint64(p.GetObjects()), 10)},
		{"last error", cmp.Or(p.GetLastError(), "none")},
	} {
		fmt.Fprintf(t, "%s\t%s\n", line[0], line[1])
	}
	return t.Flush()
}

func dryRunCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o := newOptions("dry-run -f FILE", stderr)
	file := o.flags.String("f", "", "manifest `FILE` of a Pod in YAML or JSON; \"-\" is standard input")
	only := o.flags.String("container", "", "`NAME` of the one container to try (default all)")
	rest, err := o.parse(args)
	if err != nil {
		return err
	}
	if *file == "" || len(rest) > 0 {
		return fmt.Errorf("dry-run wants -f FILE and no other argument: %w", errdefs.ErrInvalidArgument)
	}
	text, err := read(*file)
	if err != nil {
		return err
	}
	pod, containers, err := podspec.Parse(text)
	if err != nil {
		return err
	}
	if *only != "" {
		containers = slices.DeleteFunc(containers, func(c *nri.Container) bool { return c.GetName() != *only })
		if len(containers) == 0 {
			return fmt.Errorf("container %q: the pod has none of that name: %w", *only, errdefs.ErrNotFound)
		}
	}
	return o.ask(ctx, stderr, func(ctx context.Context, hub nriv1.HubServiceClient) error {
		var failures []error
		for _, c := range containers {
			resp, err := hub.DryRun(ctx, &nriv1.DryRunRequest{Pod: pod, Container: c})
			if err != nil {
				return err
			}
			if *o.json {
				err = printJSON(stdout, resp)
			} else {
				err = rehearsed(stdout, c.GetName(), resp)
			}
			if err != nil {
				return err
			}
			if f := resp.GetFailure(); f != "" {
				failures = append(failures, fmt.Errorf("container %q would not be created: %s: %w", c.GetName(), f, errdefs.ErrFailedPrecondition))
			}
		}
		return errors.Join(failures...)
	})
}

func read(file string) ([]byte, error) {
	if file == "-" {
		return io.ReadAll(os.Stdin)
	}
	return os.ReadFile(file)
}

func rehearsed(w io.Writer, name string, resp *nriv1.DryRunResponse) error {
	var b bytes.Buffer
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "container %s\n", name)
	for _, c := range resp.GetChanges() {
		what := c.GetField()
		if c.GetKey() != "" {
			what += "[" + c.GetKey() + "]"
		}
		after := c.GetNewValue()
		if c.GetRemoved() {
			after = "(removed)"
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\t->\t%s\t%s\t%s\n",
			c.GetPlugin(), what, cmp.Or(c.GetOldValue(), "(none)"), after, short(c.GetLatencyNano()), c.GetRefused())
	}
	if len(resp.GetChanges()) == 0 {
		fmt.Fprintln(t, "  no plugin changes anything")
	}
	if f := resp.GetFailure(); f != "" {
		fmt.Fprintf(t, "  would fail: %s\n", f)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := w.Write(b.Bytes())
	return err
}
