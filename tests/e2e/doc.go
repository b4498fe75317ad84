// Package e2e tells user stories over the CRI socket with the real crictl, runc,
// shim, CNI plugins and an OCI registry. Each story starts the four processes for
// itself, and at its end nothing may be left on the machine. The stories need
// root and the build tag integration; there is no code outside of the tests.
package e2e
