package app

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/eventbus/internal/access"
	"github.com/crisp-cri/crisp/services/eventbus/internal/tail"
	"github.com/crisp-cri/crisp/services/internal/cli"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

func tailCommand() cli.Command {
	return cli.Command{
		Name: "tail", Summary: "print events as they come (tail -h says more)",
		Run: func(ctx context.Context, args []string, stdout, stderr io.Writer) error {
			opts, err := tailOptions(args, stderr)
			if err != nil {
				return err
			}
			tel, err := telemetry.New(ctx, telemetry.Config{
				Service: name, Log: telemetry.LogConfig{Level: "warn", Format: "text"},
			}, stderr)
			if err != nil {
				return err
			}
			return tail.Run(ctx, opts, tel, stdout)
		},
	}
}

func tailOptions(args []string, stderr io.Writer) (tail.Options, error) {
	var opts tail.Options
	var path, topics string
	var over events.ClientConfig
	flags := flag.NewFlagSet(name+" tail", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&path, "config", "", "configuration `FILE` of the bus (default "+cli.DefaultPath(name)+" if it exists)")
	flags.StringVar(&over.URL, "url", "", "address of the bus (default: that of the configuration)")
	flags.StringVar(&over.NkeySeedFile, "nkey", "", "`FILE` with the nkey seed (default: tail.nk of the configuration)")
	flags.StringVar(&over.CAFile, "ca", "", "`FILE` of the authority that signed the certificate of the bus")
	flags.StringVar(&over.CertFile, "cert", "", "`FILE` of the client certificate, if the bus asks for one")
	flags.StringVar(&over.KeyFile, "key", "", "`FILE` of the key of the client certificate")
	flags.Uint64Var(&opts.FromSeq, "from-seq", 0, "begin with this sequence `N` instead of with new events")
	flags.BoolVar(&opts.All, "all", false, "begin with the oldest event")
	flags.BoolVar(&opts.JSON, "json", false, "print one JSON object a line")
	flags.StringVar(&topics, "topic", "", "print only these `TOPICS`, such as tasks.exit or tasks.>, separated by commas")
	flags.IntVar(&opts.Count, "count", 0, "end after `N` events")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return opts, err
		}
		return opts, fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	if flags.NArg() > 0 || opts.Count < 0 || opts.All && opts.FromSeq > 0 {
		return opts, fmt.Errorf("tail wants no arguments, a count that is not negative, and either"+
			" --all or --from-seq: %w", errdefs.ErrInvalidArgument)
	}
	if topics != "" {
		opts.Topics = strings.Split(topics, ",")
	}
	cfg, err := tailConfig(path)
	if err != nil {
		return opts, err
	}
	opts.Client = client(cfg, over)
	return opts, readable(opts.Client.NkeySeedFile)
}

// tailConfig reads the configuration of the bus. The default file is only a help: an
// ordinary user may not be allowed to read it.
func tailConfig(path string) (Config, error) {
	cfg := Default()
	err := config.LoadEither(path, cli.DefaultPath(name), &cfg)
	if path == "" && errors.Is(err, fs.ErrPermission) {
		return Default(), nil
	}
	return cfg, err
}

// client derives from the configuration of the bus how to reach it; what is set in over
// comes first.
func client(cfg Config, over events.ClientConfig) events.ClientConfig {
	out := events.DefaultClientConfig()
	out.Stream = cfg.Stream.Name
	if cfg.Broker.External() {
		out.URL, out.NkeySeedFile, out.CAFile = cfg.Broker.URL, cfg.Broker.NkeySeedFile, cfg.Broker.CAFile
	} else {
		out.URL = dialURL(cfg.Broker.Listen, cfg.Broker.TLS.CertFile != "")
		out.NkeySeedFile, out.CAFile = cfg.Access.SeedFile(access.Tail), cfg.Broker.TLS.CAFile
	}
	out.URL = cmp.Or(over.URL, out.URL)
	out.NkeySeedFile = cmp.Or(over.NkeySeedFile, out.NkeySeedFile)
	out.CAFile = cmp.Or(over.CAFile, out.CAFile)
	out.CertFile, out.KeyFile = over.CertFile, over.KeyFile
	return out
}

// readable complains about a seed that the user may not read. One that does not exist
// may come: the bus makes it at its first start.
func readable(path string) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("nkey seed, which only its group may read (or name another one with --nkey): %w", err)
	}
	return f.Close()
}

// dialURL turns the address that a server listens on into one to connect to.
func dialURL(listen string, tls bool) string {
	scheme := "nats://"
	if tls {
		scheme = "tls://"
	}
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return scheme + listen
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return scheme + net.JoinHostPort(host, port)
}
