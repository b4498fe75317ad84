// Package critest pins the CRI conformance program. It holds no code: with the
// workspace switched off,
//
//	go test -c -o critest sigs.k8s.io/cri-tools/cmd/critest
//
// builds the program here at the version that go.mod names, without its many
// dependencies becoming those of the other modules.
package critest

import (
	_ "sigs.k8s.io/cri-tools/pkg/benchmark" // The suites keep their modules in go.mod.
	_ "sigs.k8s.io/cri-tools/pkg/validate"
)
