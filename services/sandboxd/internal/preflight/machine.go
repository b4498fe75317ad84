package preflight

import "runtime"

// native says whether the kernel of this machine runs programs of an ELF machine type, also
// of the same family's smaller ones. What is not known is taken for native.
func native(machine uint16) bool {
	const x86, arm, amd64, arm64, riscv, s390, ppc64 = 3, 40, 62, 183, 243, 22, 21
	switch runtime.GOARCH {
	case "amd64":
		return machine == amd64 || machine == x86
	case "arm64":
		return machine == arm64 || machine == arm
	case "riscv64":
		return machine == riscv
	case "s390x":
		return machine == s390
	case "ppc64le":
		return machine == ppc64
	default:
		return true
	}
}
