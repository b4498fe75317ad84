package rpc

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/unixsock"
)

const (
	defaultMaxMessage   = 32 * config.MiB
	minMaxMessage       = 64 * config.KiB
	defaultDrainTimeout = 10 * time.Second
	defaultCallTimeout  = 30 * time.Second
)

// ServerConfig describes a server on a unix socket.
type ServerConfig struct {
	Socket unixsock.Config `toml:"socket"`
	// AllowedUIDs may call besides the user of the process and root. If the socket has a
	// group and is not open to others, the kernel has checked the caller already and
	// every member of the group may call.
	AllowedUIDs []uint32 `toml:"allowed_uids" comment:"User ids that may call, besides the user of the process and root. Not needed for\nmembers of the group of the socket."`
	// MaxMessage bounds a message in either direction; zero means 32 MiB.
	MaxMessage config.ByteSize `toml:"max_message" comment:"Largest message in either direction."`
	// DrainTimeout bounds the wait for running calls at stop; zero means ten seconds.
	DrainTimeout config.Duration `toml:"drain_timeout" comment:"How long running calls may go on when the process is told to stop."`
}

// DefaultServerConfig returns the defaults for a server at path, open to its own user only.
func DefaultServerConfig(path string) ServerConfig {
	return ServerConfig{
		Socket:       unixsock.Config{Path: path, Mode: 0o600},
		AllowedUIDs:  []uint32{},
		MaxMessage:   defaultMaxMessage,
		DrainTimeout: config.Duration(defaultDrainTimeout),
	}
}

// Validate implements config.Validator.
func (c ServerConfig) Validate() error {
	return errors.Join(config.Section("socket", c.Socket), checkMaxMessage(c.MaxMessage))
}

func (c ServerConfig) withDefaults() ServerConfig {
	if c.MaxMessage == 0 {
		c.MaxMessage = defaultMaxMessage
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = config.Duration(defaultDrainTimeout)
	}
	return c
}

// ClientConfig says where a server is.
type ClientConfig struct {
	// Socket is the absolute path of the server's socket.
	Socket string `toml:"socket" comment:"Path of the server's socket."`
	// Timeout is the deadline of unary calls whose context has none; zero means 30 s.
	Timeout config.Duration `toml:"timeout" comment:"Deadline of calls for which no other one is set."`
	// MaxMessage bounds a message in either direction; zero means 32 MiB.
	MaxMessage config.ByteSize `toml:"max_message" comment:"Largest message in either direction."`
}

// DefaultClientConfig returns the defaults for a client of the server at socket.
func DefaultClientConfig(socket string) ClientConfig {
	return ClientConfig{
		Socket: socket, Timeout: config.Duration(defaultCallTimeout), MaxMessage: defaultMaxMessage,
	}
}

// Validate implements config.Validator.
func (c ClientConfig) Validate() error {
	var errs []error
	if !filepath.IsAbs(c.Socket) {
		errs = append(errs, fmt.Errorf("socket: %q is not absolute, write for example \"/run/crisp/x.sock\"", c.Socket))
	}
	return errors.Join(append(errs, checkMaxMessage(c.MaxMessage))...)
}

func (c ClientConfig) withDefaults() ClientConfig {
	if c.MaxMessage == 0 {
		c.MaxMessage = defaultMaxMessage
	}
	if c.Timeout == 0 {
		c.Timeout = config.Duration(defaultCallTimeout)
	}
	return c
}

func checkMaxMessage(size config.ByteSize) error {
	if size != 0 && (size < minMaxMessage || size > config.GiB) {
		return fmt.Errorf("max_message: %v is out of range, write a size from 64KiB to 1GiB", size)
	}
	return nil
}
