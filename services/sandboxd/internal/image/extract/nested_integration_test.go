//go:build integration

package extract

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/userns"
)

func nestedArchive(t *testing.T, headers ...*tar.Header) *bytes.Reader {
	t.Helper()
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for _, h := range headers {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return bytes.NewReader(archive.Bytes())
}

// In a user namespace overlayfs keeps its notes in attributes of users: layers are written with
// those, and what an image has of that name is no note.
func TestNotesOfUsers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	a := Applier{target: Target{UserNotes: true}}
	lower, upper := t.TempDir(), t.TempDir()
	for _, dir := range []string{"hides", "shows"} {
		if err := os.Mkdir(filepath.Join(lower, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	forged := map[string]string{"SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.user.kept": "x"}
	err := a.extract(t.Context(), Over(upper, []string{lower}), nestedArchive(t,
		&tar.Header{Name: "hides/", Typeflag: tar.TypeDir, Mode: 0o755}, &tar.Header{Name: "hides/.wh..wh..opq", Typeflag: tar.TypeReg},
		&tar.Header{Name: "shows/", Typeflag: tar.TypeDir, Mode: 0o755, PAXRecords: forged, Format: tar.FormatPAX}))
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{"hides user.overlay.opaque": "y", "hides trusted.overlay.opaque": "", "shows user.overlay.opaque": "", "shows user.kept": "x"} {
		name, attr, _ := strings.Cut(path, " ")
		var value [8]byte
		n, _ := unix.Lgetxattr(filepath.Join(upper, name), attr, value[:]) // none is empty
		if got := string(value[:max(n, 0)]); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
	// The notes of the layer are read when one comes on top of it.
	b, err := openBelow([]string{upper, lower}, a.target.notes())
	if err != nil {
		t.Fatal(err)
	}
	defer b.close()
	for path, want := range map[string]int{"/hides": 1, "/shows": 2} {
		if found, err := b.at(path); err != nil || len(found.in) != want {
			t.Errorf("%s shows in %d layers, %v, want %d", path, len(found.in), err, want)
		}
	}
}

// An owner that the daemon's user namespace does not have is the node's lack, not the image's.
func TestOwnerThatIsNotMapped(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	own := userns.Namespace{UIDs: userns.Ranges{{First: 0, Count: 1000}}, GIDs: userns.Ranges{{First: 0, Count: 1000}}}
	for name, h := range map[string]*tar.Header{
		"users 1000": {Name: "file", Typeflag: tar.TypeReg, Uid: 1000}, "groups 1000": {Name: "file", Typeflag: tar.TypeReg, Gid: 1000},
	} {
		err := Applier{target: Target{Own: own}}.extract(t.Context(), Over(t.TempDir(), nil), nestedArchive(t, h))
		if err = judge(t.Context(), err); !errdefs.IsFailedPrecondition(err) || errdefs.IsDataLoss(err) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
