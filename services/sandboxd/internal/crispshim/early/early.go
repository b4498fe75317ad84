// Package early splits the process of the command "start" in two before the Go runtime
// begins: the second becomes the shim, the first ends with the command. Starting the program
// anew for the shim, as it is otherwise done, takes twice the time.
//
// The Go runtime cannot fork, so this needs cgo. In a program that was built without cgo
// nothing is split, and Waiter says so.
package early
