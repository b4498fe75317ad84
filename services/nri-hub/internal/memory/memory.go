// Package memory keeps the names of the active plugins in a small file, so that the next
// start of the hub knows for whom to wait. Nothing else depends on the file: if it is
// lost or broken, the hub waits for nobody.
package memory

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/roster"
)

var _ roster.Memory = (*File)(nil)

// File is the file. Save must not be called concurrently.
type File struct{ path string }

type content struct {
	Version int       `json:"version"`
	Active  []plug.ID `json:"active"`
}

// Open returns the file plugins.json in folder, which is made if needed, and the plugins
// in it.
func Open(folder string) (*File, []plug.ID, error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, nil, fmt.Errorf("run folder: %w", err)
	}
	f := &File{path: filepath.Join(folder, "plugins.json")}
	data, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return f, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("remembered plugins: %w", err)
	}
	var c content
	if json.Unmarshal(data, &c) != nil || c.Version != 1 {
		return f, nil, nil //nolint:nilerr // what cannot be read is as good as nothing
	}
	return f, c.Active, nil
}

// Save replaces the content. Readers see the old or the new one.
func (f *File) Save(plugins []plug.ID) error {
	data, err := json.Marshal(content{Version: 1, Active: plugins})
	if err != nil {
		return fmt.Errorf("remembered plugins: %w", err)
	}
	temp := f.path + ".new"
	if err := os.WriteFile(temp, data, 0o600); err != nil {
		return fmt.Errorf("remembered plugins: %w", err)
	}
	if err := os.Rename(temp, f.path); err != nil {
		return fmt.Errorf("remembered plugins: %w", err)
	}
	return nil
}
