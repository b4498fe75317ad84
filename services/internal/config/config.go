// Package config reads the one TOML file of a process.
//
// Reading is strict: a key that the program does not know is an error that names
// the line, because a typing error that is silently ignored is found only when it
// hurts. The file is decoded over a value that already holds every default, so a
// missing key keeps its default; the files of a folder beside it are decoded over both, so that
// several owners can each have a file of their own. The package does not read the environment, does
// not watch the file and does not look for secrets: secrets are given as paths.
package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"github.com/pelletier/go-toml/v2"
)

// Validator is implemented by configurations (and by sections of them) that can say
// what is wrong with themselves. Validate returns errors.Join of one error for each
// mistake, each of the form "key: what is wrong, what would be right".
type Validator interface {
	Validate() error
}

// Load decodes the TOML file at path over *cfg, which must already hold the
// defaults, then those of the folder path+".d" whose names end in ".toml", in the order of
// their names, and validates the result if C or *C is a Validator. A later file changes the keys
// that it has; a list is replaced as a whole. A file that does not exist gives an error that is
// both fs.ErrNotExist and errdefs.ErrNotFound; every other mistake is
// errdefs.ErrInvalidArgument.
func Load[C any](path string, cfg *C) error {
	return load(path, cfg, true)
}

// LoadEither is Load of a file that is named, or, with an empty name, of the usual one. That may
// be absent; the files of its folder count all the same.
func LoadEither[C any](named, usual string, cfg *C) error {
	if named != "" {
		return Load(named, cfg)
	}
	return load(usual, cfg, false)
}

func load[C any](path string, cfg *C, must bool) error {
	err := decodeFile(path, cfg)
	if err != nil && (must || !errors.Is(err, fs.ErrNotExist)) {
		return err
	}
	folder := path + ".d"
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("configuration %s: %w", folder, err)
	}
	for _, e := range entries { // in the order of their names
		if filepath.Ext(e.Name()) != ".toml" || e.Name()[0] == '.' {
			continue
		}
		if err := decodeFile(filepath.Join(folder, e.Name()), cfg); err != nil {
			return err
		}
	}
	if err := validate(cfg); err != nil {
		return fmt.Errorf("configuration %s: %w", path, err)
	}
	return nil
}

func decodeFile(path string, cfg any) error {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("configuration %s: %w: %w", path, errdefs.ErrNotFound, err)
	}
	if err != nil {
		return fmt.Errorf("configuration %s: %w", path, err)
	}
	if err := decode(bytes.NewReader(text), cfg); err != nil {
		return fmt.Errorf("configuration %s: %w", path, err)
	}
	return nil
}

// Decode is Load for a text that is already at hand.
func Decode[C any](r io.Reader, cfg *C) error {
	if err := decode(r, cfg); err != nil {
		return err
	}
	return validate(cfg)
}

func decode(r io.Reader, cfg any) error {
	if err := toml.NewDecoder(r).DisallowUnknownFields().Decode(cfg); err != nil {
		return fmt.Errorf("%w: %s", errdefs.ErrInvalidArgument, explain(err))
	}
	return nil
}

// Dump writes cfg as TOML. Struct tags `comment:"…"` become comments above the key,
// so that the output of a default configuration is its own reference.
func Dump(w io.Writer, cfg any) error {
	if err := toml.NewEncoder(w).Encode(cfg); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	return nil
}

// CheckVersion is the common check of the key "version" at the top of each file.
func CheckVersion(got int) error {
	if got != 1 {
		return fmt.Errorf("version: %d is not known, the only version is 1", got)
	}
	return nil
}

// Section validates one section and puts its name in front of each complaint.
func Section(name string, v Validator) error {
	err := v.Validate()
	if err == nil {
		return nil
	}
	var joined interface{ Unwrap() []error }
	if !errors.As(err, &joined) {
		return fmt.Errorf("%s.%w", name, err)
	}
	var out []error
	for _, e := range joined.Unwrap() {
		out = append(out, fmt.Errorf("%s.%w", name, e))
	}
	return errors.Join(out...)
}

func validate[C any](cfg *C) error {
	v, ok := any(cfg).(Validator)
	if !ok {
		return nil
	}
	if err := v.Validate(); err != nil {
		return fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	return nil
}

// explain turns the errors of the decoder into text with line and excerpt.
func explain(err error) string {
	if strict, ok := errors.AsType[*toml.StrictMissingError](err); ok {
		return "unknown key:\n" + strict.String()
	}
	if dec, ok := errors.AsType[*toml.DecodeError](err); ok {
		row, col := dec.Position()
		return fmt.Sprintf("line %d, column %d: %v\n%s", row, col, err, dec.String())
	}
	return err.Error()
}
