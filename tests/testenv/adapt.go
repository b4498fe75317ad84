package testenv

import (
	"os"
	"strconv"
	"testing"
)

// The runtime handlers of a system: our own shim, which is the default one, and the stock shim.
const (
	HandlerCrisp = "crisp"
	HandlerStock = "runc"
)

// handlerVariable names the default handler of all systems whose Setup names none.
const handlerVariable = "CRISP_TEST_HANDLER"

// EachHandler tells a story with each shim. It is for stories that depend on the shim.
func EachHandler(t *testing.T, story func(t *testing.T, handler string)) {
	t.Helper()
	for _, handler := range []string{HandlerCrisp, HandlerStock} {
		t.Run(handler, func(t *testing.T) { story(t, handler) })
	}
}

// defaultHandler is the handler for pods that name none; empty leaves it to the program.
func (s *System) defaultHandler() string {
	if s.setup.Handler != "" {
		return s.setup.Handler
	}
	return os.Getenv(handlerVariable)
}

// adapt sets what a test's system needs otherwise than an installed one.
func (s *System) adapt(p Process, settings Settings, plugins string) error {
	switch p {
	case Sandboxd:
		return s.adaptSandboxd(settings, plugins)
	case Gateway:
		settings.Set("events.nkey_seed_file", s.BusKey("gateway"))
	case NRIHub:
		settings.Set("events.nkey_seed_file", s.BusKey("hub"))
	case EventBus:
	}
	return nil
}

func (s *System) adaptSandboxd(settings Settings, plugins string) error {
	runc, err := Binary("runc")
	if err != nil {
		return err
	}
	if !s.setup.Privileged {
		settings.Set("server.socket.mode", "0660")
		settings.Set("server.socket.group", strconv.Itoa(nobody))
	}
	settings.Set("bus.client.nkey_seed_file", s.BusKey("sandboxd"))
	settings.Set("network.bin_dirs", []string{s.layout.path("cni"), plugins})
	for handler, shim := range map[string]string{HandlerCrisp: "containerd-shim-crisp-v1", HandlerStock: "containerd-shim-runc-v2"} {
		path, err := Binary(shim)
		if err != nil {
			return err
		}
		settings.Set("runtime.handlers."+handler+".shim_path", path)
		settings.Set("runtime.handlers."+handler+".binary_name", runc)
		settings.Set("runtime.handlers."+handler+".runtime_root", s.layout.path("run", "runc"))
	}
	if handler := s.defaultHandler(); handler != "" {
		settings.Set("runtime.default_handler", handler)
	}
	return nil
}

// BusKey is the file with the seed by which a role (sandboxd, gateway, hub or
// tail) proves itself to the bus. The bus makes it at its first start.
func (s *System) BusKey(role string) string {
	return s.layout.path("lib", "eventbus", "keys", role+".nk")
}
