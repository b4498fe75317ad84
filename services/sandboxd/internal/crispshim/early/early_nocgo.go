//go:build !cgo

package early

import "os"

// Waiter is the way to the process that waits for this one; without cgo there is none.
func Waiter() *os.File { return nil }
