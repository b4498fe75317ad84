package mount

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
)

func TestFollow(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	var s Sources
	want, err := filepath.EvalSymlinks(dir)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := s.follow(link, time.Minute); got != want || err != nil {
		t.Errorf("link: %q, %v", got, err)
	}
	if _, err := s.follow(filepath.Join(dir, "none"), time.Minute); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what is not there: %v", err)
	}

	// A look that hangs is left alone, and those who come later do not begin another one.
	hung, begun := make(chan struct{}), make(chan struct{})
	ended := s.looks.DoChan("/hung", func() (any, error) {
		close(begun)
		<-hung
		return "/there", nil
	})
	<-begun
	for range 2 {
		if _, err := s.follow("/hung", time.Millisecond); !errdefs.IsUnavailable(err) {
			t.Errorf("look that hangs: %v", err)
		}
	}
	close(hung)
	<-ended
	if _, err := s.follow("/hung", time.Minute); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after it was over: %v", err)
	}
}

// A mount of every container whose source hangs holds up nobody for ever either.
func TestDefaultMountThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s Sources
		hung := make(chan struct{})
		ended := s.looks.DoChan("/hung", func() (any, error) {
			<-hung
			return "/there", nil
		})
		d := &draft{Policy: Policy{Sources: &s}}
		if _, err := d.defaultMount(Default{Source: "/hung", Destination: "/in"}); !errdefs.IsUnavailable(err) {
			t.Errorf("mount that hangs: %v", err)
		}
		close(hung)
		<-ended
	})
}
