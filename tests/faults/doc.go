// Package faults breaks things under a running system and looks at what the callers of
// CRI see and what is left: calls that race, processes that die, plugins and shims that
// fail, disks that are full. Each test's system must come back by itself.
package faults
