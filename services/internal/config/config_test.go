package config_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/crisp-cri/crisp/services/internal/config"
)

type inner struct {
	Wait config.Duration `toml:"wait" comment:"How long."`
	Size config.ByteSize `toml:"size"`
	Tags []string        `toml:"tags"`
}

func (i inner) Validate() error {
	if i.Size < 10 {
		return errors.Join(errors.New("size: too small"), errors.New("wait: too short"))
	}
	return nil
}

type outer struct {
	Version int   `toml:"version"`
	Inner   inner `toml:"inner"`
}

func (o outer) Validate() error {
	return errors.Join(config.CheckVersion(o.Version), config.Section("inner", o.Inner))
}

func defaults() outer {
	return outer{Version: 1, Inner: inner{
		Wait: config.Duration(90 * time.Second), Size: 64 * config.MiB, Tags: []string{"a", "b"},
	}}
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "x.toml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLoadKeepsDefaultsOfMissingKeys(t *testing.T) {
	t.Parallel()
	cfg := defaults()
	if err := config.Load(write(t, "version = 1\n[inner]\ntags = ['c']\n"), &cfg); err != nil {
		t.Fatal(err)
	}
	want := defaults()
	want.Inner.Tags = []string{"c"}
	if diff := cmp.Diff(want, cfg); diff != "" {
		t.Error(diff)
	}
}

func TestDumpIsReadBack(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := config.Dump(&out, defaults()); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "# How long.\nwait = '1m30s'") {
		t.Errorf("no comment or odd duration in:\n%s", out.String())
	}
	var cfg outer
	if err := config.Decode(&out, &cfg); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(defaults(), cfg); diff != "" {
		t.Error(diff)
	}
}

func TestLoadRefuses(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ text, want string }{
		"unknown key":    {"version = 1\nverbose = true\n", "2| verbose = true"},
		"unknown nested": {"[inner]\nsise = '1MiB'\n", "sise"},
		"bad duration":   {"[inner]\nwait = '5 apples'\n", "line 2"},
		"negative":       {"[inner]\nwait = '-5s'\n", "negative"},
		"bad size":       {"[inner]\nsize = '5 MB'\n", "no size"},
		"too large":      {"[inner]\nsize = '9999999999TiB'\n", "too large"},
		"syntax":         {"version = \n", "line 1"},
		"validation":     {"[inner]\nsize = '1B'\n", "inner.wait: too short"},
		"version":        {"version = 7\n", "version: 7 is not known"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := defaults()
			err := config.Load(write(t, tc.text), &cfg)
			if !errors.Is(err, errdefs.ErrInvalidArgument) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an invalid argument that says %q", err, tc.want)
			}
		})
	}
}

func TestLoadOfMissingFile(t *testing.T) {
	t.Parallel()
	cfg := defaults()
	err := config.Load(filepath.Join(t.TempDir(), "none.toml"), &cfg)
	if !errors.Is(err, fs.ErrNotExist) || !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	cfg.Version = 3
	if err := config.LoadEither("", filepath.Join(t.TempDir(), "none.toml"), &cfg); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("without a file: %v, want the validation's error", err)
	}
	if err := config.LoadEither(filepath.Join(t.TempDir(), "none.toml"), write(t, ""), &cfg); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("a file that is named and absent: %v", err)
	}
}

// Further files change the keys that they have, in the order of their names, with or without a
// main file; mistakes name the file.
func TestFilesBesideTheMainOne(t *testing.T) {
	t.Parallel()
	type handler struct {
		Type string   `toml:"type"`
		Args []string `toml:"args"`
	}
	type cfg struct {
		Name     string             `toml:"name"`
		Handlers map[string]handler `toml:"handlers"`
	}
	fresh := func() cfg {
		return cfg{Name: "default", Handlers: map[string]handler{"a": {Type: "first", Args: []string{"x"}}}}
	}
	main := filepath.Join(t.TempDir(), "x.toml")
	put := func(path, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put(main+".d/20-last.toml", "name = 'last'\n[handlers.b]\ntype = 'second'\n")
	put(main+".d/10-early.toml", "name = 'early'\n[handlers.a]\nargs = ['y']\n")
	put(main+".d/.hidden.toml", "broken")
	put(main+".d/notes.txt", "broken")
	want := cfg{Name: "last", Handlers: map[string]handler{"a": {Type: "first", Args: []string{"y"}}, "b": {Type: "second"}}}
	for _, text := range []string{"", "name = 'main'\n[handlers.a]\nargs = ['z', 'z']\n"} {
		if text != "" {
			put(main, text)
		}
		got := fresh()
		if err := config.LoadEither("", main, &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("with main file %q: %s", text, diff)
		}
	}
	put(main+".d/30-bad.toml", "nam = 1\n")
	got := fresh()
	if err := config.Load(main, &got); !errors.Is(err, errdefs.ErrInvalidArgument) || !strings.Contains(err.Error(), "30-bad.toml") {
		t.Errorf("a bad file: %v", err)
	}
}

func TestByteSizeText(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]config.ByteSize{
		"0": 0, "17": 17, "17B": 17, "4KiB": 4096, " 2 MiB": 2 << 20, "3GiB": 3 << 30, "1TiB": 1 << 40,
	} {
		var got config.ByteSize
		if err := got.UnmarshalText([]byte(text)); err != nil || got != want {
			t.Errorf("%q: got %d, %v, want %d", text, got, err, want)
		}
		var again config.ByteSize
		if err := again.UnmarshalText([]byte(got.String())); err != nil || again != got {
			t.Errorf("%q: %s is read back as %d, %v", text, got, again, err)
		}
	}
}

func TestDurationText(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{"60s": "1m", "3600s": "1h", "90m": "1h30m", "0s": "0s", "1500ms": "1.5s"} {
		var d config.Duration
		if err := d.UnmarshalText([]byte(text)); err != nil || d.String() != want {
			t.Errorf("%q: got %s, %v, want %s", text, d, err, want)
		}
	}
}
