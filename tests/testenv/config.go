package testenv

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/pelletier/go-toml/v2"
)

// Settings is a process's configuration as read from TOML.
type Settings map[string]any

// Set gives the dotted key a value, making the tables on the way.
func (s Settings) Set(key string, value any) {
	table := map[string]any(s)
	parts := strings.Split(key, ".")
	for _, part := range parts[:len(parts)-1] {
		inner, ok := table[part].(map[string]any)
		if !ok {
			inner = map[string]any{}
			table[part] = inner
		}
		table = inner
	}
	table[parts[len(parts)-1]] = value
}

// Get gives the value of the dotted key, or nil.
func (s Settings) Get(key string) any {
	var value any = map[string]any(s)
	for part := range strings.SplitSeq(key, ".") {
		table, ok := value.(map[string]any)
		if !ok {
			return nil
		}
		value = table[part]
	}
	return value
}

// layout is where a system keeps its files.
type layout struct{ root string }

func (l layout) path(parts ...string) string {
	return filepath.Join(append([]string{l.root}, parts...)...)
}

// moved maps the places of an installed system to those of a test's.
func (l layout) moved() [][2]string {
	return [][2]string{
		{"/etc/crisp/certs.d", l.path("hosts")},
		{"/etc/containerd/certs.d", l.path("hosts")},
		{"/etc/cni/net.d", l.path("net.d")},
		{"/etc/nri/conf.d", l.path("nri", "conf.d")},
		{"/opt/nri/plugins", l.path("nri", "plugins")},
		{"/var/run/nri", l.path("nri")},
		{"/var/run/netns", l.path("run", "netns")},
		{"/run/netns", l.path("run", "netns")},
		{"/var/lib/crisp", l.path("lib")},
		{"/run/crisp", l.path("run")},
		{"/etc/crisp", l.path("etc")},
	}
}

// relocate rewrites every path in the settings that begins with a known place.
func (l layout) relocate(value any) any {
	switch v := value.(type) {
	case string:
		for _, m := range l.moved() {
			// The unix: scheme of an address stays.
			if at := strings.Index(v, m[0]); at == 0 || at > 0 && v[at-1] == '/' || at > 0 && v[at-1] == ':' {
				return v[:at] + m[1] + v[at+len(m[0]):]
			}
		}
		return v
	case []any:
		for i := range v {
			v[i] = l.relocate(v[i])
		}
		return v
	case map[string]any:
		for key := range v {
			v[key] = l.relocate(v[key])
		}
		return v
	default:
		return v
	}
}

// told is what programs have told of themselves, by their path: they stay the same while tests run.
var told = struct {
	mu       sync.Mutex
	defaults map[string][]byte
}{defaults: map[string][]byte{}}

// defaults asks a program for its default configuration.
func defaults(ctx context.Context, path string) (Settings, error) {
	told.mu.Lock()
	text, known := told.defaults[path]
	told.mu.Unlock()
	if !known {
		var err error
		if text, err = exec.CommandContext(ctx, path, "config", "default").Output(); err != nil {
			return nil, fmt.Errorf("%s config default: %w", filepath.Base(path), err)
		}
		told.mu.Lock()
		told.defaults[path] = text
		told.mu.Unlock()
	}
	var settings Settings
	if err := toml.Unmarshal(text, &settings); err != nil {
		return nil, fmt.Errorf("%s config default: %w", filepath.Base(path), err)
	}
	return settings, nil
}

// writeConfig writes the settings. The program checks them when it is started.
func writeConfig(path string, settings Settings) error {
	var text bytes.Buffer
	if err := toml.NewEncoder(&text).Encode(map[string]any(settings)); err != nil {
		return err
	}
	return os.WriteFile(path, text.Bytes(), 0o644)
}
