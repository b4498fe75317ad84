package testkit

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

// Patience is how long a test waits for what must happen. It says nothing about how long that takes:
// on a machine that does other work, too, a process may not run for seconds.
const Patience = time.Minute

const pause = 10 * time.Millisecond

// Eventually calls try until it returns nil, and fails the test with the last error if
// that takes longer than limit.
func Eventually(tb testing.TB, limit time.Duration, try func() error) {
	tb.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			tb.Fatalf("not within %v: %v", limit, err)
		}
		<-time.After(pause)
	}
}

// Receive returns what comes out of c, and fails the test if nothing does.
func Receive[T any](tb testing.TB, c <-chan T) T {
	tb.Helper()
	var v T
	select {
	case v = <-c:
	case <-time.After(Patience):
		tb.Fatalf("nothing came within %v", Patience)
	}
	return v
}

// Main runs the tests of a package, gives their goroutines Patience to end in, and panics if some do
// not. goleak alone gives them less than half a second; and a failure that is no test's must not be
// one that goes away when tests are run once more.
func Main(m goleak.TestingM, ignored ...goleak.Option) {
	if m.Run() != 0 {
		return // package testing keeps the outcome
	}
	deadline := time.Now().Add(Patience)
	for left := goleak.Find(ignored...); left != nil; left = goleak.Find(ignored...) {
		if time.Now().After(deadline) {
			panic(left)
		}
	}
}
