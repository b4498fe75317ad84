package testenv

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
)

var errMissing = errors.New("not found")

// Root is the folder of the checkout, found upwards from the working folder.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.work")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", fmt.Errorf("go.work above the working folder: %w", errMissing)
		}
		dir = parent
	}
}

// Binary finds a program: in the folder that CRISP_BIN names or else in the
// checkout's .bin, and for programs that are not of this project also in PATH.
func Binary(name string) (string, error) {
	bin, err := binFolder()
	if err != nil {
		return "", err
	}
	path := filepath.Join(bin, name)
	if isProgram(path) {
		return path, nil
	}
	if slices.Contains(startOrder(), Process(name)) {
		return "", fmt.Errorf("program %s: %w (build it first)", path, errMissing)
	}
	found, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("program %s: %w in %s and PATH", name, errMissing, bin)
	}
	return filepath.Abs(found)
}

// CNIFolder is the folder with the CNI plugins: the one CRISP_CNI_BIN names,
// the checkout's .bin/cni, or the distribution's.
func CNIFolder() (string, error) {
	bin, err := binFolder()
	if err != nil {
		return "", err
	}
	for _, dir := range []string{os.Getenv("CRISP_CNI_BIN"), filepath.Join(bin, "cni"), "/opt/cni/bin", "/usr/lib/cni"} {
		if dir != "" && isProgram(filepath.Join(dir, "bridge")) {
			return dir, nil
		}
	}
	return "", fmt.Errorf("CNI plugins: %w", errMissing)
}

func binFolder() (string, error) {
	if dir := os.Getenv("CRISP_BIN"); dir != "" {
		return filepath.Abs(dir)
	}
	root, err := Root()
	if err != nil {
		return "", err
	}
	return filepath.Join(root, ".bin"), nil
}

func isProgram(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}
