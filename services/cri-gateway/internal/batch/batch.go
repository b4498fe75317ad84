// Package batch cuts lists into messages that fit into any client's limit.
package batch

import "google.golang.org/protobuf/proto"

const (
	maxItems = 256
	// maxBytes is far below the 16 MiB that clients receive; one item that is larger
	// travels alone.
	maxBytes = 1 << 20
)

// Send passes items to send in order, in pieces of bounded count and size. It stops at
// the first error. Nothing is sent for an empty list.
func Send[T proto.Message](items []T, send func([]T) error) error {
	start, size := 0, 0
	for i, item := range items {
		n := proto.Size(item)
		if i > start && (i-start == maxItems || size+n > maxBytes) {
			if err := send(items[start:i]); err != nil {
				return err
			}
			start, size = i, 0
		}
		size += n
	}
	if start == len(items) {
		return nil
	}
	return send(items[start:])
}
