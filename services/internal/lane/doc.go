// Package lane carries unary gRPC calls over one standing stream between two processes.
//
// A gRPC call is a stream of its own, with headers, trailers and bookkeeping that cost
// more than the handling of a small request. On a lane a call is one message there and one
// back. What is around a call stays: its deadline and the end of the caller's wait reach
// the handler, the trace goes on, errors keep their codes, the interceptors of the server
// run. Metadata does not travel, and answers of other calls are never waited for.
//
// A lane that breaks fails its calls with Unavailable, since nobody knows how far they have
// come; the next call opens a new one. So does one whose server reads nothing for seconds. The server lets calls that it has begun finish
// before it stops.
package lane
