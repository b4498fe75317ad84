// Package relay passes the pieces of a streamed list on while they come in. It holds one
// piece at a time, so a long list needs no memory here, and a slow reader slows its source.
package relay

import (
	"errors"
	"io"
)

// Source is the receiving side of a stream.
type Source[T any] interface{ Recv() (T, error) }

// Copy sends the items of every piece of the source, in order, until the source ends or
// something fails. An empty piece is left out, as CRI wants.
func Copy[Piece, Item any](from Source[Piece], items func(Piece) []Item, send func([]Item) error) error {
	for {
		piece, err := from.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if got := items(piece); len(got) > 0 {
			if err := send(got); err != nil {
				return err
			}
		}
	}
}
