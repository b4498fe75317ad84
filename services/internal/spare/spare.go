// Package spare keeps goroutines for reuse where many short ones are started.
//
// A new goroutine begins with a small stack, which deep calls make grow by copying again and
// again. One that is kept has its stack already. The package bounds what is kept, not what
// runs: Go never waits.
package spare

import "sync/atomic"

// most is how many goroutines are kept idle.
const most = 16

// Pool runs functions on goroutines that it keeps. Use New.
type Pool struct {
	next chan func()
	end  <-chan struct{}
	idle atomic.Int32
}

// New makes a pool whose idle goroutines end when end is closed.
func New(end <-chan struct{}) *Pool {
	return &Pool{next: make(chan func()), end: end}
}

// Go runs f on a goroutine of its own. It may be called concurrently, also after the end.
func (p *Pool) Go(f func()) {
	select {
	case p.next <- f:
	default:
		go p.work(f)
	}
}

func (p *Pool) work(f func()) {
	for {
		f()
		if p.idle.Add(1) > most {
			p.idle.Add(-1)
			return
		}
		select {
		case f = <-p.next:
			p.idle.Add(-1)
		case <-p.end:
			p.idle.Add(-1)
			return
		}
	}
}
