// Package rpc is gRPC between processes of one machine: a server and a client on unix
// sockets with everything that is the same for all of them.
//
// Handlers return plain errors that wrap a sentinel of containerd/errdefs, and clients
// get the same back; only this package knows gRPC codes. On the server the order is,
// outermost first: trace, metrics, log, recovery, peer credentials, deadline floor,
// error mapping, handler. On the client: error mapping, default deadline, metrics, log,
// trace. A client waits for a server that is not there yet, within its deadline, so
// that the restart of a server is a short wait for the callers and not an error.
//
// The package has no transport security of its own: file mode and peer credentials
// of the socket say who may call. Retrying is left to the caller.
package rpc
