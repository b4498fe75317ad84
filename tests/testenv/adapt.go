package testenv

import "strconv"

// adapt sets what a test's system needs otherwise than an installed one.
func (s *System) adapt(p Process, settings Settings, plugins string) error {
	switch p {
	case Sandboxd:
		return s.adaptSandboxd(settings, plugins)
	case Gateway:
		settings.Set("events.nkey_seed_file", s.BusKey("gateway"))
	case EventBus, NRIHub:
	}
	return nil
}

func (s *System) adaptSandboxd(settings Settings, plugins string) error {
	shim, err := Binary("containerd-shim-runc-v2")
	if err != nil {
		return err
	}
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
	settings.Set("runtime.handlers.runc.shim_path", shim)
	settings.Set("runtime.handlers.runc.binary_name", runc)
	settings.Set("runtime.handlers.runc.runtime_root", s.layout.path("run", "runc"))
	return nil
}

// BusKey is the file with the seed by which a role (sandboxd, gateway, hub or
// tail) proves itself to the bus. The bus makes it at its first start.
func (s *System) BusKey(role string) string {
	return s.layout.path("lib", "eventbus", "keys", role+".nk")
}
