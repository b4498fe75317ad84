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
	select {
	case v := <-c:
		return v
	case <-time.After(Patience):
		tb.Fatalf("nothing came within %v", Patience)
		panic("unreachable")
	}
}

// Main runs the tests of a package, and fails it if goroutines of theirs do not end. They get
// Patience to end in; goleak alone gives them less than half a second.
func Main(m goleak.TestingM, ignored ...goleak.Option) {
	goleak.VerifyTestMain(settled{m, ignored}, ignored...)
}

// settled are tests that return when no goroutine of theirs is left or patience is at its end.
type settled struct {
	goleak.TestingM

	ignored []goleak.Option
}

// Run implements goleak.TestingM.
func (s settled) Run() int {
	code := s.TestingM.Run()
	for deadline := time.Now().Add(Patience); code == 0 && time.Now().Before(deadline); {
		if goleak.Find(s.ignored...) == nil {
			break
		}
	}
	return code
}
