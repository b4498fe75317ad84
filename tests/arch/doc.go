// Package arch holds the tests of the project's architecture: what may import
// what, how packages are documented, that the modules agree with each other, and
// that copies equal their originals. They read sources and run the go command;
// they need no privilege and no running process. There is no code outside of
// the tests.
package arch
