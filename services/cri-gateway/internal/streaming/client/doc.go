// Package client is the client's end of a streaming session: it speaks SPDY and the
// sub-protocols of WebSocket, and gives whoever serves the session plain streams, terminal sizes
// and a way to report the outcome.
//
// A client that is gone is noticed by whoever reads from or writes to it, and by pings while
// its input is not read. Terminal sizes that make no sense are ignored; of many the last one
// counts.
package client
