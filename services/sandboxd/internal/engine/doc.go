// Package engine puts the use cases of sandboxd together and finds everything again after a
// restart. The use cases are in the packages below it:
//
//	sandbox    preparing, committing, stopping and removing sandboxes
//	container  preparing, committing, changing and removing containers
//	task       starting, following and stopping the processes of containers
//	exec       further processes, and clients connected to processes
//	capture    checkpoints of containers and pods
//	view       what is shown to callers, plugins and operators
//	table      all objects with their records, names and sessions
//	event      the events that are owed to the world
//	work       what outlives a call
//	port       what the engine needs of the world outside
//
// Imports point down: engine → sandbox → container → task, exec, capture,
// view → table → event,
// work, port.
//
// Concurrency: operations on one sandbox or one container take turns (a slot per object,
// waited for under the caller's context); operations on different objects never wait for
// each other. No mutex is held across a call through a port.
//
// Ends: work runs under the context that it is given; callers that may go away hand in a
// context that does not (the API does so). Undo runs under a context of its own.
package engine
