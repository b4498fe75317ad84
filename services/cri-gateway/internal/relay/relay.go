// Package relay passes lists on without looking into them: whole ones as the bytes that they
// come in, streamed ones piece by piece. It holds one piece at a time, so a long streamed list
// needs no memory here, and a slow reader slows its source.
package relay

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
)

// Whole makes a call and puts its answer, undecoded, into another message of the same wire
// form: fields of the same numbers and types. Whoever decodes that sees the fields; here they
// stay unknown ones, which costs a long list half of its time in the gateway.
func Whole(ctx context.Context, conn grpc.ClientConnInterface, method string, req, into proto.Message) error {
	raw := &emptypb.Empty{}
	if err := conn.Invoke(ctx, method, req, raw); err != nil {
		return err
	}
	into.ProtoReflect().SetUnknown(raw.ProtoReflect().GetUnknown())
	return nil
}

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
