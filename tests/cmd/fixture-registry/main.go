// Command fixture-registry serves the images of package fixture from a real OCI
// registry on loopback, until it is told to stop.
//
// It prints its address as the first line of its output once all images can be
// pulled. With --sample it serves only the demonstration image; with --layout
// it writes the images as an OCI layout and ends.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/crisp-cri/crisp/tests/fixture"
)

type options struct {
	parts              fixture.PartsConfig
	registry           fixture.Config
	user               string
	bearer, sample     bool
	hostsDir, hostList string
	layout             string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "fixture-registry:", err)
		os.Exit(1)
	}
}

func parse(args []string) (options, error) {
	var o options
	flags := flag.NewFlagSet("fixture-registry", flag.ContinueOnError)
	flags.StringVar(&o.parts.Cache, "cache", "", "folder that keeps fetched and built parts (default crisp-fixture in the user's cache)")
	flags.StringVar(&o.parts.Busybox, "busybox", "", "busybox program to use instead of the distribution's dynamic one")
	flags.StringVar(&o.parts.Guest, "guest", "", "static guest program to use instead of building it")
	flags.StringVar(&o.registry.Addr, "addr", "127.0.0.1:0", "address to listen on")
	flags.StringVar(&o.user, "user", "", "USER:PASSWORD to demand")
	flags.BoolVar(&o.bearer, "bearer", false, "with --user: hand out bearer tokens instead of taking the password with each request")
	flags.StringVar(&o.hostsDir, "hosts-dir", "", "folder to write hosts.toml files to that point at this registry")
	flags.StringVar(&o.hostList, "hosts", "", "comma separated registry hosts for --hosts-dir (default: all registries)")
	flags.BoolVar(&o.sample, "sample", false, "serve only "+fixture.SampleImage)
	flags.StringVar(&o.layout, "layout", "", "write the images as an OCI layout to this folder and end")
	if err := flags.Parse(args); err != nil {
		return options{}, err
	}
	if o.user == "" {
		return o, nil
	}
	user, password, found := strings.Cut(o.user, ":")
	if !found {
		return options{}, fmt.Errorf("--user %q: want USER:PASSWORD", o.user)
	}
	o.registry.Auth = fixture.Auth{Scheme: fixture.BasicAuth, User: user, Password: password}
	if o.bearer {
		o.registry.Auth.Scheme = fixture.BearerAuth
	}
	return o, nil
}

func run(ctx context.Context, args []string, out io.Writer) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	parts, err := fixture.FindParts(ctx, o.parts)
	if err != nil {
		return err
	}
	images, err := fixture.Conformance(parts)
	if o.sample {
		images, err = fixture.Sample(parts)
	}
	if err != nil {
		return err
	}
	if o.layout != "" {
		return fixture.WriteLayout(o.layout, images)
	}
	registry, err := fixture.Serve(ctx, o.registry, images)
	if err != nil {
		return err
	}
	if o.hostsDir != "" {
		var hosts []string
		if o.hostList != "" {
			hosts = strings.Split(o.hostList, ",")
		}
		if err := fixture.WriteHosts(o.hostsDir, registry.Addr(), hosts...); err != nil {
			return err
		}
	}
	fmt.Fprintln(out, registry.Addr())
	<-ctx.Done()
	return registry.Close()
}
