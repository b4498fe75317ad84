// Command fixture-guest is the program inside the fixture images.
//
// It is one static binary that behaves by the name it is started under: as a
// pause process, as the web servers that conformance tests expect, as the few
// tools that Debian's busybox lacks (ipcs, pgrep), as a setuid probe and as a
// talkative sample. It uses no library beyond Go's own and does only what the
// images need of it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
)

var errUsage = errors.New("usage: fixture-guest pause|nginx|httpd|ipcs|pgrep|nnp|sample [arguments]")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGWINCH)
	defer stop()
	err := run(ctx, os.Args, os.Stdout)
	if err == nil {
		return
	}
	if !errors.Is(err, errNoMatch) {
		fmt.Fprintln(os.Stderr, err)
	}
	stop()
	os.Exit(1)
}

func run(ctx context.Context, args []string, out io.Writer) error {
	name := personality(args[0])
	if name == "fixture-guest" {
		if len(args) < 2 {
			return errUsage
		}
		args = args[1:]
		name = args[0]
	}
	switch name {
	case "pause":
		return pause(ctx)
	case "nginx":
		return serveNginx(ctx, args, out)
	case "httpd":
		return serveHTTPD(ctx, out)
	case "ipcs":
		return ipcs(args[1:], out)
	case "pgrep":
		return pgrep(args[1:], out)
	case "nnp":
		_, err := fmt.Fprintf(out, "Effective uid: %d\n", os.Geteuid())
		return err
	case "sample":
		return sample(ctx, args[1:], out)
	default:
		return fmt.Errorf("%q: %w", name, errUsage)
	}
}

// personality is the program's role: the first word of the last path element
// of argv[0], so that a rewritten process title keeps the role.
func personality(argv0 string) string {
	name, _, _ := strings.Cut(argv0, ":")
	return filepath.Base(name)
}

// pause reaps the orphans that become its children and ends with ctx.
func pause(ctx context.Context) error {
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	defer signal.Stop(children)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-children:
			reap()
		}
	}
}

func reap() {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if err != nil || pid <= 0 {
			return
		}
	}
}
