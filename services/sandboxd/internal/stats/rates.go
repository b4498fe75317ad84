package stats

import (
	"sync"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	// shortest is the least time between two readings that a rate is computed from; within
	// it the last rate is given again.
	shortest = time.Second
	// forgotten is how long the reading of a cgroup is kept that nobody asks for.
	forgotten = 10 * time.Minute
)

// rates tells how fast a counter grows, from one reading to the next. Its zero value is
// ready for use.
type rates struct {
	// mu guards what follows.
	mu      sync.Mutex
	samples map[string]sample
	pruned  time.Time
}

type sample struct {
	at    time.Time
	total uint64
	rate  *criv1.UInt64Value
}

// observe takes a reading in and returns the present rate per second; nil before there are
// two readings.
func (r *rates) observe(key string, now time.Time, total uint64) *criv1.UInt64Value {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prune(now)
	last, ok := r.samples[key]
	switch {
	case !ok || total < last.total:
		r.samples[key] = sample{at: now, total: total}
		return nil
	case now.Sub(last.at) < shortest:
		return last.rate
	}
	rate := value(uint64(float64(total-last.total) / now.Sub(last.at).Seconds()))
	r.samples[key] = sample{at: now, total: total, rate: rate}
	return rate
}

func (r *rates) prune(now time.Time) {
	if r.samples == nil {
		r.samples = make(map[string]sample)
	}
	if now.Sub(r.pruned) < forgotten {
		return
	}
	r.pruned = now
	for key, s := range r.samples {
		if now.Sub(s.at) > forgotten {
			delete(r.samples, key)
		}
	}
}
