//go:build integration

package extract

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A link that comes in the place of a folder while a layer is being written leads nowhere, and
// folders that the layer does not describe look as they do below.
func TestFoldersThatTurnIntoLinks(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	const files = 1500
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for n := range files {
		for _, err := range []error{
			w.WriteHeader(&tar.Header{Name: fmt.Sprintf("below/d/%d", n), Typeflag: tar.TypeReg, Mode: 0o4755, Size: 1}),
			second(w.Write([]byte("x"))),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for name, lower := range map[string][]string{"alone": nil, "over another": {t.TempDir()}} {
		t.Run(name, func(t *testing.T) {
			upper, outside := t.TempDir(), t.TempDir()
			for _, dir := range append(lower, upper) {
				if err := os.Mkdir(filepath.Join(dir, "below"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			for _, dir := range lower {
				if err := os.MkdirAll(filepath.Join(dir, "below", "d"), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.Chmod(filepath.Join(dir, "below"), 0o750|os.ModeSticky); err != nil {
					t.Fatal(err)
				}
			}
			stop, stopped := make(chan struct{}), make(chan int)
			go func() {
				swaps := 0
				defer func() { stopped <- swaps }()
				folder, link := filepath.Join(upper, "below", "d"), filepath.Join(upper, "link")
				if err := os.Symlink(outside, link); err != nil {
					t.Error(err)
				}
				for {
					select {
					case <-stop:
						return
					default:
						if unix.Renameat2(unix.AT_FDCWD, folder, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE) == nil {
							swaps++
						}
					}
				}
			}()
			for range 4 {
				// Whether it succeeds is a matter of luck.
				_ = Applier{}.extract(t.Context(), Over(upper, lower), bytes.NewReader(archive.Bytes()))
			}
			close(stop)
			if swaps := <-stopped; swaps == 0 {
				t.Error("nothing was swapped")
			}
			for _, name := range []string{"below", "link"} {
				if err := os.RemoveAll(filepath.Join(upper, name)); err != nil {
					t.Fatal(err)
				}
			}
			if err := (Applier{}).extract(t.Context(), Over(upper, lower), bytes.NewReader(archive.Bytes())); err != nil {
				t.Error(err)
			}
			if left, err := os.ReadDir(outside); err != nil || len(left) > 0 {
				t.Errorf("%d files outside: %v", len(left), err)
			}
			fi, err := os.Stat(filepath.Join(upper, "below"))
			if err != nil || len(lower) > 0 && fi.Mode() != 0o750|os.ModeSticky|os.ModeDir {
				t.Errorf("the folder that the layer does not describe: %v, %v", fi.Mode(), err)
			}
		})
	}
}

func second(_ int, err error) error { return err }
