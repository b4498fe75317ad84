// Package streaming serves exec, attach and port forwarding to clients over HTTP, by SPDY
// and by WebSocket (package client), and carries the bytes to and from sandboxd.
//
// A call for a URL stores the request under a random token; the URL works once and for
// one minute. A session ends when the process ends, when the client goes, or when the
// server stops, and then leaves no goroutine behind: the end of a connection is noticed
// by its reading side, and on a connection that is not read because the process takes no
// input, by pings. All output of a process is delivered before its exit status.
//
// Whether an object exists and may be asked for is checked by whoever asks for a URL.
package streaming
