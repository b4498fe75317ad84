// Package classes gives containers their classes of cache, memory bandwidth (Intel RDT) and
// block I/O, which pods choose by annotation and NRI plugins by name.
//
// The classes are described in files in the form of goresctrl, which is also that of other
// runtimes. The annotations are goresctrl's: on a pod
// "rdt.resources.beta.kubernetes.io/pod" and "…/container.<name>", on a container
// "io.kubernetes.cri.rdt-class", and the same with "blockio". A class that is asked for where
// no file is configured, or that the file does not have, is an error: a pod that relies on it
// must not run without it.
//
// The library keeps its configuration for the whole process; so there is one [Classes] in it.
// Its methods may be called concurrently.
package classes

import (
	"fmt"
	"slices"
	"sync"

	"github.com/containerd/errdefs"
	"github.com/intel/goresctrl/pkg/blockio"
	"github.com/intel/goresctrl/pkg/kubernetes"
	"github.com/intel/goresctrl/pkg/rdt"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// Classes knows the classes of a node.
type Classes struct {
	initialize sync.Once
	initErr    error

	mu               sync.RWMutex // guards what follows and the library's configuration
	hasRDT, hasBlock bool
}

// Load reads the files anew; an empty path means that there are no such classes. A file that
// is wrong leaves what was loaded before. Errors: ErrFailedPrecondition if the machine has no
// RDT, ErrInvalidArgument for a wrong file.
func (c *Classes) Load(rdtFile, blockFile string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if rdtFile != "" {
		c.initialize.Do(func() { c.initErr = rdt.Initialize("") })
		if c.initErr != nil {
			return fmt.Errorf("RDT classes of %s: %w: %w", rdtFile, errdefs.ErrFailedPrecondition, c.initErr)
		}
		if err := rdt.SetConfigFromFile(rdtFile, true); err != nil {
			return fmt.Errorf("RDT classes of %s: %w: %w", rdtFile, errdefs.ErrInvalidArgument, err)
		}
	}
	c.hasRDT = rdtFile != ""
	if blockFile != "" {
		if err := blockio.SetConfigFromFile(blockFile, true); err != nil {
			return fmt.Errorf("block I/O classes of %s: %w: %w", blockFile, errdefs.ErrInvalidArgument, err)
		}
	}
	c.hasBlock = blockFile != ""
	return nil
}

// RDT returns the class that annotations ask for; nil if they ask for none. Errors:
// ErrFailedPrecondition without configured classes, ErrInvalidArgument for an unknown or
// denied one.
func (c *Classes) RDT(container string, own, pod map[string]string) (*specs.LinuxIntelRdt, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	class, err := c.rdtClass(container, own, pod)
	if err != nil || class == "" {
		return nil, err
	}
	return &specs.LinuxIntelRdt{ClosID: class}, nil
}

// RDTClass returns the class of a name. Errors: as RDT.
func (c *Classes) RDTClass(class string) (*specs.LinuxIntelRdt, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if !c.hasRDT {
		return nil, noRDT(class)
	}
	// Only a class that the pod chose itself is subject to what the file denies to pods.
	if _, known := rdt.GetClass(class); !known {
		return nil, fmt.Errorf("RDT class %q is not among the configured ones: %w", class, errdefs.ErrInvalidArgument)
	}
	return &specs.LinuxIntelRdt{ClosID: class}, nil
}

func noRDT(class string) error {
	return fmt.Errorf("RDT class %q: no RDT classes are configured: %w", class, errdefs.ErrFailedPrecondition)
}

func (c *Classes) rdtClass(container string, own, pod map[string]string) (string, error) {
	if !c.hasRDT {
		if class := rdtAsked(container, own, pod); class != "" {
			return "", noRDT(class)
		}
		return "", nil
	}
	class, err := rdt.ContainerClassFromAnnotations(container, own, pod)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	return class, nil
}

// BlockIO returns the values of the class that annotations ask for; nil if they ask for none.
// Errors: as RDT.
func (c *Classes) BlockIO(container string, own, pod map[string]string) (*specs.LinuxBlockIO, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	class := blockAsked(container, own, pod)
	if class == "" {
		return nil, nil //nolint:nilnil // no class is a regular answer
	}
	return c.blockIO(class)
}

// BlockIOClass returns the values of a class. Errors: as RDT.
func (c *Classes) BlockIOClass(class string) (*specs.LinuxBlockIO, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.blockIO(class)
}

func (c *Classes) blockIO(class string) (*specs.LinuxBlockIO, error) {
	if !c.hasBlock {
		return nil, fmt.Errorf("block I/O class %q: no block I/O classes are configured: %w", class, errdefs.ErrFailedPrecondition)
	}
	if !slices.Contains(blockio.GetClasses(), class) {
		return nil, fmt.Errorf("block I/O class %q is not among the configured %q: %w", class, blockio.GetClasses(), errdefs.ErrInvalidArgument)
	}
	values, err := blockio.OciLinuxBlockIO(class)
	if err != nil {
		return nil, fmt.Errorf("block I/O class %q: %w: %w", class, errdefs.ErrInvalidArgument, err)
	}
	return values, nil
}

// rdtAsked and blockAsked are the classes that annotations name, whether they exist or not.
func rdtAsked(container string, own, pod map[string]string) string {
	class, _ := kubernetes.ContainerClassFromAnnotations(rdt.RdtContainerAnnotation, rdt.RdtPodAnnotation,
		rdt.RdtPodAnnotationContainerPrefix, container, own, pod)
	return class
}

func blockAsked(container string, own, pod map[string]string) string {
	class, _ := kubernetes.ContainerClassFromAnnotations(blockio.BlockioContainerAnnotation, blockio.BlockioPodAnnotation,
		blockio.BlockioPodAnnotationContainerPrefix, container, own, pod)
	return class
}
