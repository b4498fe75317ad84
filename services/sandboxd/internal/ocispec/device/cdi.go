package device

import (
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// CDIFromFolders returns the CDI injector for the device descriptions in the given folders;
// they are read anew each time, so that new devices are found.
func CDIFromFolders(folders []string) func(*specs.Spec, []string) error {
	return func(spec *specs.Spec, names []string) error {
		cache, err := cdi.NewCache(cdi.WithSpecDirs(folders...), cdi.WithAutoRefresh(false))
		if err != nil {
			return err
		}
		_, err = cache.InjectDevices(spec, names...)
		return err
	}
}

// InjectCDI adds CDI devices to a specification; a nil injector means that CDI is not enabled.
// Errors: ErrFailedPrecondition without CDI, ErrInvalidArgument for an unknown device.
func InjectCDI(spec *specs.Spec, names []string, inject func(*specs.Spec, []string) error) error {
	if inject == nil {
		return fmt.Errorf("CDI devices %q: CDI is not enabled: %w", names, errdefs.ErrFailedPrecondition)
	}
	if err := inject(spec, names); err != nil {
		return fmt.Errorf("CDI devices %q: %w: %w", names, err, errdefs.ErrInvalidArgument)
	}
	return nil
}
