package container

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// volumeName is a folder name for the volume at a path inside a container.
func volumeName(path string) string {
	sum := sha256.Sum256([]byte(path))
	return hex.EncodeToString(sum[:16])
}

// signalName turns a CRI signal into the kernel's name: SIGNAL_SIGTERM is SIGTERM,
// SIGNAL_SIGRTMINPLUS3 is SIGRTMIN+3.
func signalName(s criv1.Signal) string {
	name := strings.TrimPrefix(s.String(), "SIGNAL_")
	name = strings.Replace(name, "PLUS", "+", 1)
	return strings.Replace(name, "MINUS", "-", 1)
}
