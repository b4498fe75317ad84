// Package containerevents turns what the bus tells of containers and sandboxes into CRI's
// container events, and hands each to everybody who follows them.
//
// A follower gets every event from the moment that Follow returned, once, and in order for
// each container: created, started, stopped, deleted. Statuses are asked from sandboxd and
// are at least as new as the event. What the bus delivers twice, what is unknown to
// sandboxd, and what is older than what was told already is dropped, so an event can
// neither be repeated nor run backwards.
//
// Followers are independent of each other: each has a bounded queue, and one that does not
// read is cut off with ResourceExhausted. When events may have been missed (the bus is away
// or dropped some, sandboxd does not answer, the process stops) all followers are cut off
// with Unavailable, which tells them to list. Without followers nothing is kept and nothing
// is asked.
package containerevents
