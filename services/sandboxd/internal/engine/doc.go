// Package engine holds the use cases of sandboxd: preparing, committing, aborting,
// stopping and removing sandboxes and containers, following the ends of processes, and
// finding everything again after a restart.
//
// Truth: a record is the last value that was written to the store; memory holds the same
// value and answers all reads. Records are never changed in place: an operation clones
// one, writes the clone, and only then shows it. So readers take no lock and see only what
// is durable.
//
// Concurrency: operations on one sandbox or one container take turns (a slot per object,
// waited for under the caller's context); operations on different objects never wait for
// each other. No mutex is held across a call through a port.
//
// Ends: work runs under the context that it is given; callers that may go away hand in a
// context that does not (the API does so). Undo runs under a context of its own.
package engine
