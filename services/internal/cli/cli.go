// Package cli is the body of every main: the same subcommands with the same meaning
// in each program. It parses arguments and configuration and hands over; it starts
// nothing and never ends the process itself. The one signal that it catches is SIGHUP, for run.
package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/buildinfo"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/reload"
)

// Program describes one executable. C is the type of its configuration.
type Program[C any] struct {
	// Name is the name of the program; its file is /etc/crisp/<Name>.toml.
	Name string
	// Default returns a configuration with every default set.
	Default func() C
	// Check looks for mistakes that the configuration cannot see by itself; nil for none. It
	// starts nothing.
	Check func(cfg C) error
	// Run does the work until ctx is done. Its logs go to stderr; again tells when and how
	// the configuration is read anew.
	Run func(ctx context.Context, cfg C, stderr io.Writer, again reload.Source[C]) error
	// Admin returns the address of the admin listener, for the health subcommand.
	Admin func(cfg C) string
	// Extra holds further subcommands.
	Extra []Command
}

// Command is a subcommand that only one program has. It parses its own arguments.
type Command struct {
	Name, Summary string

	Run func(ctx context.Context, args []string, stdout, stderr io.Writer) error
}

// Main runs the subcommand that args (without the program name) asks for:
//
//	run [--config FILE]           run until ctx is done
//	config default                print the default configuration
//	config check [--config FILE]  read and validate the configuration
//	health [--config FILE]        ask the running process whether it is ready
//	version                       print what the binary was built from
//
// and those of p.Extra. The default file may be absent; a file named by --config
// must exist. See [config.Load] for the files of the folder beside it. Mistakes in the arguments are errdefs.ErrInvalidArgument.
func Main[C any](ctx context.Context, p Program[C], args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		usage(stderr, p)
		return fmt.Errorf("a subcommand is missing: %w", errdefs.ErrInvalidArgument)
	}
	name, rest := args[0], args[1:]
	switch name {
	case "run":
		return run(ctx, p, rest, stderr)
	case "config":
		return configCommand(p, rest, stdout, stderr)
	case "health":
		return health(ctx, p, rest, stderr)
	case "version":
		_, err := fmt.Fprintf(stdout, "%s %s\n", p.Name, buildinfo.Read())
		return err
	case "help", "-h", "--help":
		usage(stdout, p)
		return nil
	}
	for _, c := range p.Extra {
		if c.Name == name {
			return ignoreHelp(c.Run(ctx, rest, stdout, stderr))
		}
	}
	usage(stderr, p)
	return fmt.Errorf("subcommand %q is not known: %w", name, errdefs.ErrInvalidArgument)
}

// DefaultPath returns where the configuration of the named program is looked for.
func DefaultPath(name string) string { return "/etc/crisp/" + name + ".toml" }

func run[C any](ctx context.Context, p Program[C], args []string, stderr io.Writer) error {
	cfg, err := parse(p, "run", args, stderr)
	if err != nil {
		return ignoreHelp(err)
	}
	if err := keepDescriptors(); err != nil {
		return err
	}
	return p.Run(ctx, cfg, stderr, reload.Source[C]{
		Signals: reload.OnHangup(), Load: func() (C, error) { return parse(p, "run", args, stderr) },
	})
}

func configCommand[C any](p Program[C], args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		return fmt.Errorf("config wants \"default\" or \"check\": %w", errdefs.ErrInvalidArgument)
	}
	switch args[0] {
	case "default":
		return config.Dump(stdout, p.Default())
	case "check":
		if _, err := parse(p, "config check", args[1:], stderr); err != nil {
			return ignoreHelp(err)
		}
		_, err := fmt.Fprintln(stdout, "configuration is valid")
		return err
	}
	return fmt.Errorf("config %q is not known, it wants \"default\" or \"check\": %w",
		args[0], errdefs.ErrInvalidArgument)
}

// parse reads --config and loads the file it names, or the default file if there is one.
func parse[C any](p Program[C], command string, args []string, stderr io.Writer) (C, error) {
	cfg := p.Default()
	flags := flag.NewFlagSet(p.Name+" "+command, flag.ContinueOnError)
	flags.SetOutput(stderr)
	path := flags.String("config", "", "configuration `FILE` (default "+DefaultPath(p.Name)+" if it exists)")
	if err := flags.Parse(args); err != nil {
		return cfg, badFlags(err)
	}
	if flags.NArg() > 0 {
		return cfg, fmt.Errorf("argument %q is not expected: %w", flags.Arg(0), errdefs.ErrInvalidArgument)
	}
	err := config.LoadEither(*path, DefaultPath(p.Name), &cfg)
	if err != nil || p.Check == nil {
		return cfg, err
	}
	if err := p.Check(cfg); err != nil {
		return cfg, fmt.Errorf("configuration: %w", err)
	}
	return cfg, nil
}

func badFlags(err error) error {
	if errors.Is(err, flag.ErrHelp) {
		return err
	}
	return fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
}

// ignoreHelp makes asking for help a success: the flag set has printed it already.
func ignoreHelp(err error) error {
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	return err
}

func usage[C any](w io.Writer, p Program[C]) {
	fmt.Fprintf(w, "usage: %s COMMAND [ARGUMENTS]\n\n", p.Name)
	line := func(name, summary string) { fmt.Fprintf(w, "  %-30s %s\n", name, summary) }
	line("run [--config FILE]", "run until SIGTERM or SIGINT; SIGHUP reads the configuration anew")
	line("config default", "print the default configuration")
	line("config check [--config FILE]", "read and validate the configuration")
	line("health [--config FILE]", "exit with 0 if the running process is ready")
	line("version", "print what the binary was built from")
	for _, c := range p.Extra {
		line(c.Name, c.Summary)
	}
}
