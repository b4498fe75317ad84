package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/pause"
)

const (
	// copyTries bounds how often a copy is begun anew because the original changed.
	copyTries = 100
	copyPause = 10 * time.Millisecond
)

// Copy makes a consistent copy of a database that its owner goes on writing to, without
// taking the owner's lock. It fails with ErrUnavailable if commits come faster than the
// file can be copied, which a new call may overcome.
//
// It relies on how the database commits: the pages of the last committed state are not
// written again before the next state is committed, and a commit ends by changing one of
// the two pages at the beginning. If those are the same before and after the copying, the
// copy holds that state, whatever was written beside it.
func Copy(ctx context.Context, from, to string) error {
	src, err := os.Open(from)
	if err != nil {
		return fmt.Errorf("copy database: %w", err)
	}
	defer func() { _ = src.Close() }() // it was only read
	for range copyTries {
		same, err := copyOnce(src, to)
		if err != nil {
			return fmt.Errorf("copy database %s: %w", from, err)
		}
		if same {
			return nil
		}
		if !pause.For(ctx, copyPause) {
			return context.Cause(ctx)
		}
	}
	return fmt.Errorf("copy database %s: it changes too fast: %w", from, errdefs.ErrUnavailable)
}

// copyOnce copies the file and says whether no commit happened meanwhile.
func copyOnce(src *os.File, to string) (same bool, err error) {
	before, err := head(src)
	if err != nil {
		return false, err
	}
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return false, err
	}
	const all = 1 << 62
	_, err = io.Copy(dst, io.NewSectionReader(src, 0, all))
	err = errors.Join(err, dst.Close())
	if err != nil {
		return false, err
	}
	after, err := head(src)
	return bytes.Equal(before, after), err
}

// head reads the two pages at the beginning, each of which describes a committed state.
func head(f *os.File) ([]byte, error) {
	buf := make([]byte, 2*os.Getpagesize())
	_, err := f.ReadAt(buf, 0)
	return buf, err
}
