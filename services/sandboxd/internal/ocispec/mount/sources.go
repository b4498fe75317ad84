package mount

import (
	"fmt"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/singleflight"
)

// answerTime is how long a file system of the node may take to tell where a source is.
const answerTime = 15 * time.Second

// Sources looks for the sources of mounts and for devices. They lie on file systems of others, which may hang for
// ever, as those of servers that are away do; whoever asks then gets an error, and only one look
// at a path is left hanging, however often it is asked for. The zero value is ready.
type Sources struct{ looks singleflight.Group }

// Follow resolves the links of a path on the node, in bounded time. It fails with ErrUnavailable if
// the file system does not answer, else as filepath.EvalSymlinks.
func (s *Sources) Follow(path string) (string, error) { return s.follow(path, answerTime) }

// follow resolves the links of a path on the node. It fails with ErrUnavailable if the file system
// does not answer within limit, else as filepath.EvalSymlinks.
func (s *Sources) follow(path string, limit time.Duration) (string, error) {
	look := s.looks.DoChan(path, func() (any, error) { return filepath.EvalSymlinks(path) })
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case r := <-look:
		followed, _ := r.Val.(string)
		return followed, r.Err
	case <-t.C:
		return "", fmt.Errorf("the file system does not answer within %v: %w", limit, errdefs.ErrUnavailable)
	}
}
