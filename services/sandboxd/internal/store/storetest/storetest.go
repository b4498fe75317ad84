// Package storetest damages stores as a fault of the disk would, for tests.
package storetest

import (
	"errors"
	"testing"

	"go.etcd.io/bbolt"
)

// Spoil puts a sandbox's record that cannot be read into a store that is not open.
func Spoil(tb testing.TB, path, id string) {
	tb.Helper()
	db, err := bbolt.Open(path, 0o600, nil)
	if err != nil {
		tb.Fatal(err)
	}
	err = db.Update(func(tx *bbolt.Tx) error { return tx.Bucket([]byte("sandboxes")).Put([]byte(id), []byte{0xff}) })
	if err := errors.Join(err, db.Close()); err != nil {
		tb.Fatal(err)
	}
}
