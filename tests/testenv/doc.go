// Package testenv runs the whole system for tests: the four processes, a
// container network and a registry, from a declarative Setup.
//
// Everything lives below one folder with a short name and in a network and a
// mount namespace of the test binary's own (Main), so that bridges, host ports,
// packet filter rules and mounts of a test meet nothing of the machine's.
// The processes are the built binaries, driven over their sockets; nothing of
// theirs is linked. Their logs are kept and shown when a test fails.
//
// A System's methods may be called concurrently, except that one process must
// not be stopped and started by two callers at once.
package testenv
