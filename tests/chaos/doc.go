// Package chaos runs pods while the processes of the runtime are killed: at random moments, and
// in each round sandboxd or a shim at a moment of one step of run, create, start, exec, stop
// and remove. The pods of the rounds have the stock shim and our own in turn.
//
// The callers behave as kubelet does: they repeat a call with the same name and attempt when
// it was cut off, and make a new attempt when a pod or container is lost. After each round
// all that was promised must hold: records and machine agree, nothing is left behind, and of
// each container that was started, each step of its life was told once and in order.
//
// The victims, the moments and what the callers do follow from a seed, so that a failing
// round can be run again, as far as the machine's timing allows: CRISP_CHAOS_SEED sets the
// seed, CRISP_CHAOS_ROUNDS the number of rounds (20 if it is not set, about three minutes; 200
// need go test -timeout 60m), CRISP_CHAOS_FIRST the first of them.
package chaos
