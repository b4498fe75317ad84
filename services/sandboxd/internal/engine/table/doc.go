// Package table is the memory of the engine: every sandbox and container with its record,
// the names they hold and the gateway sessions that are open. It alone writes records.
//
// Truth: a record is the last value that was written to the store; memory holds the same
// value and answers all reads. Records are never changed in place: a change is made on a
// clone, the clone is written together with its events, and only then shown. So readers
// take no lock and see only what is durable. What is being prepared may show a record that
// is not written yet (Show); no list shows it.
//
// Concurrency: all methods may be called at any time. Operations on one object take turns
// (Turn), so that operations on different objects never wait for each other. The table
// decides nothing; the rules of the operations are in the packages of the use cases.
package table
