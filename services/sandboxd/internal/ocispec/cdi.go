package ocispec

import (
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
