package spare_test

import (
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/crisp-cri/crisp/services/internal/spare"
)

// All functions run side by side, more than are kept, and nothing is left after the end.
func TestEachRunsAndNothingIsLeft(t *testing.T) {
	defer goleak.VerifyNone(t)
	end := make(chan struct{})
	defer close(end)
	p := spare.New(end)
	for range 3 {
		var here, all sync.WaitGroup
		here.Add(50)
		for range 50 {
			all.Add(1)
			p.Go(func() {
				defer all.Done()
				here.Done()
				here.Wait() // returns only when all 50 are running
			})
		}
		all.Wait()
	}
}
