// Package pieces sends lists in pieces while they are made, so that neither side holds all of a
// long one.
package pieces

import "google.golang.org/protobuf/proto"

// Bounds of one piece of a streamed list: the first is reached soon even by what is slow to
// measure, the second is far below what any client receives. A larger item travels alone.
const (
	pieceItems = 64
	pieceBytes = 1 << 20
)

// pieces sends a list in pieces while it is made. One goroutine uses it.
type pieces[T proto.Message] struct {
	send  func([]T) error
	items []T
	size  int
}

// add takes an item in, and sends a piece when it is full.
func (p *pieces[T]) add(item T) error {
	size := proto.Size(item)
	if len(p.items) == pieceItems || len(p.items) > 0 && p.size+size > pieceBytes {
		if err := p.flush(); err != nil {
			return err
		}
	}
	p.items = append(p.items, item)
	p.size += size
	return nil
}

// flush sends what is left; nothing if nothing is.
func (p *pieces[T]) flush() error {
	if len(p.items) == 0 {
		return nil
	}
	items := p.items
	p.items, p.size = nil, 0
	return p.send(items)
}

// Stream sends what each hands on, in order. It ends with the first error, of each or of send.
func Stream[T proto.Message](each func(do func(T) error) error, send func([]T) error) error {
	p := pieces[T]{send: send}
	if err := each(p.add); err != nil {
		return err
	}
	return p.flush()
}

// Collect gathers what each hands on.
func Collect[T any](each func(do func(T) error) error) ([]T, error) {
	var out []T
	err := each(func(item T) error {
		out = append(out, item)
		return nil
	})
	return out, err
}
