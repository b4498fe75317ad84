package cli_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/cli"
	"github.com/crisp-cri/crisp/services/internal/reload"
)

type cfg struct {
	Version int    `toml:"version"`
	Name    string `toml:"name"`
}

func program() cli.Program[cfg] {
	return cli.Program[cfg]{
		Name:    "crisp-cli-test",
		Default: func() cfg { return cfg{Version: 1, Name: "default"} },
		Run: func(_ context.Context, c cfg, stderr io.Writer, again reload.Source[cfg]) error {
			anew, err := again.Load()
			if err != nil || anew != c {
				return fmt.Errorf("read anew: %+v, %w", anew, err)
			}
			_, err = fmt.Fprintf(stderr, "ran %s", c.Name)
			return err
		},
		Check: func(c cfg) error {
			if c.Name == "odd" {
				return fmt.Errorf("name: %q: %w", c.Name, errdefs.ErrInvalidArgument)
			}
			return nil
		},
		Admin: func(c cfg) string { return c.Name },
		Extra: []cli.Command{{Name: "extra", Summary: "do more", Run: func(_ context.Context, args []string, stdout, _ io.Writer) error {
			_, err := fmt.Fprint(stdout, "extra ", args)
			return err
		}}},
	}
}

func TestMainCommands(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "c.toml")
	if err := os.WriteFile(file, []byte("name = 'file'\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	bad := filepath.Join(t.TempDir(), "bad.toml")
	if err := os.WriteFile(bad, []byte("nam = 'file'\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	odd := filepath.Join(t.TempDir(), "odd.toml")
	if err := os.WriteFile(odd, []byte("name = 'odd'\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		args           []string
		stdout, stderr string
		fails          error
	}{
		"run without a file":     {args: []string{"run"}, stderr: "ran default"},
		"run with a file":        {args: []string{"run", "--config", file}, stderr: "ran file"},
		"named file must exist":  {args: []string{"run", "--config", file + "x"}, fails: errdefs.ErrNotFound},
		"file is checked":        {args: []string{"run", "--config", bad}, fails: errdefs.ErrInvalidArgument},
		"config default":         {args: []string{"config", "default"}, stdout: "version = 1\nname = 'default'\n"},
		"config check":           {args: []string{"config", "check", "--config", file}, stdout: "configuration is valid"},
		"config check finds bad": {args: []string{"config", "check", "--config", bad}, fails: errdefs.ErrInvalidArgument},
		"config check looks on":  {args: []string{"config", "check", "--config", odd}, fails: errdefs.ErrInvalidArgument},
		"run looks on, too":      {args: []string{"run", "--config", odd}, fails: errdefs.ErrInvalidArgument},
		"config alone":           {args: []string{"config"}, fails: errdefs.ErrInvalidArgument},
		"config of something":    {args: []string{"config", "edit"}, fails: errdefs.ErrInvalidArgument},
		"version":                {args: []string{"version"}, stdout: "crisp-cli-test "},
		"extra":                  {args: []string{"extra", "a", "b"}, stdout: "extra [a b]"},
		"help":                   {args: []string{"--help"}, stdout: "do more"},
		"help of run":            {args: []string{"run", "-h"}, stderr: "-config FILE"},
		"nothing":                {args: nil, stderr: "usage: crisp-cli-test", fails: errdefs.ErrInvalidArgument},
		"unknown":                {args: []string{"fly"}, stderr: "usage", fails: errdefs.ErrInvalidArgument},
		"unknown flag":           {args: []string{"run", "--fast"}, fails: errdefs.ErrInvalidArgument},
		"stray argument":         {args: []string{"run", "fast"}, fails: errdefs.ErrInvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var stdout, stderr bytes.Buffer
			err := cli.Main(t.Context(), program(), tc.args, &stdout, &stderr)
			if !errors.Is(err, tc.fails) {
				t.Errorf("error: got %v, want %v", err, tc.fails)
			}
			if !strings.Contains(stdout.String(), tc.stdout) {
				t.Errorf("stdout: got %q, want %q", stdout.String(), tc.stdout)
			}
			if !strings.Contains(stderr.String(), tc.stderr) {
				t.Errorf("stderr: got %q, want %q", stderr.String(), tc.stderr)
			}
		})
	}
}

func TestHealthAsksTheRunningProcess(t *testing.T) {
	t.Parallel()
	answer := http.StatusOK
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/readyz" {
			answer = http.StatusNotFound
		}
		w.WriteHeader(answer)
		_, _ = io.WriteString(w, "store is away")
	}))
	ask := func(address string) error {
		file := filepath.Join(t.TempDir(), "c.toml")
		if err := os.WriteFile(file, fmt.Appendf(nil, "version = 1\nname = %q\n", address), 0o600); err != nil {
			t.Fatal(err)
		}
		return cli.Main(t.Context(), program(), []string{"health", "--config", file}, io.Discard, io.Discard)
	}
	address := srv.Listener.Addr().String()
	if err := ask(address); err != nil {
		t.Errorf("ready process: %v", err)
	}
	answer = http.StatusServiceUnavailable
	if err := ask(address); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "store is away") {
		t.Errorf("process that is not ready: %v, want unavailable with the reason", err)
	}
	srv.Close()
	if err := ask(address); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("no process: %v, want unavailable", err)
	}
	if err := ask(""); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("no admin listener: %v, want failed precondition", err)
	}
}
