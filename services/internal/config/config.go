// Package config reads the one TOML file of a process.
//
// Reading is strict: a key that the program does not know is an error that names
// the line, because a typing error that is silently ignored is found only when it
// hurts. The file is decoded over a value that already holds every default, so a
// missing key keeps its default. The package does not read the environment, does
// not watch the file and does not look for secrets: secrets are given as paths.
package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

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
// defaults, and validates the result if C or *C is a Validator. With an empty path
// only the validation is done. A file that does not exist gives an error that is
// both fs.ErrNotExist and errdefs.ErrNotFound; every other mistake is
// errdefs.ErrInvalidArgument.
func Load[C any](path string, cfg *C) error {
	if path == "" {
		return validate(cfg)
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("configuration %s: %w: %w", path, errdefs.ErrNotFound, err)
	}
	if err != nil {
		return fmt.Errorf("configuration %s: %w", path, err)
	}
	if err := Decode(bytes.NewReader(text), cfg); err != nil {
		return fmt.Errorf("configuration %s: %w", path, err)
	}
	return nil
}

// Decode is Load for a text that is already at hand.
func Decode[C any](r io.Reader, cfg *C) error {
	dec := toml.NewDecoder(r).DisallowUnknownFields()
	if err := dec.Decode(cfg); err != nil {
		return fmt.Errorf("%w: %s", errdefs.ErrInvalidArgument, explain(err))
	}
	return validate(cfg)
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
