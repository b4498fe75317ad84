// Package listen is how clients of the streaming server are met: connections that know when
// their client has gone, also once an HTTP server has let go of them, and HTTPS by files that
// may be replaced while it serves.
package listen
