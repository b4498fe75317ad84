// Package extract writes the layers of images into folders.
//
// A layer is written in two steps. The first writes what it has itself and marks what it hides,
// without a look at other layers; the second, when the layers below are there, drops marks of what
// is not there and gives folders that the layer does not describe the attributes that they have
// below. So layers of one image can be written side by side, see [Aside], with the same result.
//
// A whiteout hides what is below its layer and nothing that the layer has itself, wherever in the
// archive it stands. Whatever names and links a layer has, and whoever changes its folder
// meanwhile, nothing outside of the folder is read or written. The package knows nothing of registries and
// records, and keeps nothing.
package extract

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/userns"
)

// maxTrailer bounds what may follow the end of a layer's archive, in bytes. A few thousand are
// usual; what goes on for ever would never be known to be wrong.
const maxTrailer = 64 << 20

// Decoder turns the content of a layer into a tar archive, which the caller owes a Close.
type Decoder interface {
	Tar(ctx context.Context, desc ocispec.Descriptor, r io.Reader) (io.ReadCloser, error)
}

// Applier extracts layers into snapshots that are prepared on top of those below. It is safe for
// concurrent use.
type Applier struct {
	content content.Provider
	decoder Decoder
	target  Target
	// algorithm is that of the digest of a layer's archive; nil for the usual one.
	algorithm func(blob digest.Digest) digest.Algorithm
}

// New returns what extracts layers from a store of blobs, as the decoder reads them.
func New(store content.Provider, d Decoder, t Target) Applier {
	return Applier{content: store, decoder: d, target: t}
}

// Hashing returns an applier that tells the digests of archives by the algorithms that are given for
// the blobs of layers.
func (a Applier) Hashing(algorithm func(blob digest.Digest) digest.Algorithm) Applier {
	a.algorithm = algorithm
	return a
}

// Target is what layers are extracted for. The zero value is a root of the machine, who mounts
// overlayfs without options.
type Target struct {
	// Own is the user namespace that the files' owners are of.
	Own userns.Namespace
	// UserNotes says that overlayfs keeps its notes in attributes that any user may write, as it is
	// mounted in a user namespace.
	UserNotes bool
}

// What overlayfs's notes are called: how they begin, and that of a folder that hides all below.
const (
	notesTrusted = "trusted.overlay."
	notesUser    = "user.overlay."
	noteOpaque   = "opaque"
)

// notes begins the attributes by which overlayfs keeps its own notes.
func (t Target) notes() string {
	if t.UserNotes {
		return notesUser
	}
	return notesTrusted
}

// isNote says whether an attribute would be a note of overlayfs that keeps those, or of one that
// is mounted by the root of the machine.
func isNote(name, notes string) bool {
	return strings.HasPrefix(name, notes) || strings.HasPrefix(name, notesTrusted)
}

// Apply implements diff.Applier. With overlayfs a layer goes into its own folder, in overlayfs's
// notation; else into the mounted whole. Errors tell a system that refuses (ErrInternal, or as it is
// for a full disk) from a layer that is malformed (ErrDataLoss); ErrFailedPrecondition is the
// decoder's.
func (a Applier) Apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount, _ ...diff.ApplyOpt) (ocispec.Descriptor, error) {
	got, err := a.read(ctx, desc, func(r io.Reader) error { return a.extract(ctx, mounts, r) })
	return got, judge(ctx, err)
}

func (a Applier) extract(ctx context.Context, mounts []mount.Mount, r io.Reader) error {
	upper, lower, ok := overlayFolders(mounts)
	if !ok {
		return mount.WithTempMount(ctx, mounts, func(root string) error {
			return a.target.newLayer(false, nil).write(ctx, root, r)
		})
	}
	b, err := openBelow(lower, a.target.notes())
	if err != nil {
		return err
	}
	defer b.close()
	l := a.target.newLayer(true, b)
	if err := l.write(ctx, upper, r); err != nil {
		return err
	}
	return l.settle(upper, b)
}

// overlayFolders are a layer's own folder and those below it, the topmost first.
func overlayFolders(mounts []mount.Mount) (upper string, lower []string, ok bool) {
	if len(mounts) != 1 || mounts[0].Type != "overlay" {
		return "", nil, false
	}
	for _, o := range mounts[0].Options {
		if dir, found := strings.CutPrefix(o, "upperdir="); found {
			upper = dir
		} else if dirs, found := strings.CutPrefix(o, "lowerdir="); found {
			lower = strings.Split(dirs, ":")
		}
	}
	return upper, lower, upper != ""
}

// Over describes a layer's own folder and those below it, the topmost first, to an [Applier],
// which writes into it without a mount.
func Over(upper string, lower []string) []mount.Mount {
	if len(lower) == 0 {
		return []mount.Mount{{Type: "bind", Source: upper, Options: []string{"rw", "rbind"}}}
	}
	return []mount.Mount{{
		Type:    "overlay",
		Source:  "overlay",
		Options: []string{"upperdir=" + upper, "lowerdir=" + strings.Join(lower, ":")},
	}}
}

// read hands the archive of a layer to use, and returns what was in it to its end.
func (a Applier) read(ctx context.Context, desc ocispec.Descriptor, use func(io.Reader) error) (_ ocispec.Descriptor, err error) {
	ra, err := a.content.ReaderAt(ctx, desc)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	defer ra.Close()
	tar, err := a.decoder.Tar(ctx, desc, content.NewReader(ra))
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	defer tar.Close()
	algorithm := digest.Canonical
	if a.algorithm != nil {
		algorithm = a.algorithm(desc.Digest)
	}
	hash := algorithm.Digester()
	counted := &counter{r: io.TeeReader(tar, hash.Hash()), over: ctx.Err}
	if err := use(counted); err != nil {
		return ocispec.Descriptor{}, err
	}
	// What follows the end of the archive counts too.
	switch trailer, err := io.Copy(io.Discard, io.LimitReader(counted, maxTrailer+1)); {
	case err != nil:
		return ocispec.Descriptor{}, err
	case trailer > maxTrailer:
		return ocispec.Descriptor{}, fmt.Errorf("more than %d bytes after the end of the archive", maxTrailer)
	}
	return ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Size: counted.n, Digest: hash.Digest()}, nil
}

// judge says of an error whose fault it is.
func judge(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil {
		return err
	}
	errno, system := errors.AsType[syscall.Errno](err)
	switch {
	case errno == syscall.ENOSPC || errno == syscall.EDQUOT || errdefs.IsFailedPrecondition(err):
		return err
	case system && !layersFault(errno) && !linkToFolder(err):
		return fmt.Errorf("%w: %w", err, errdefs.ErrInternal)
	}
	return fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
}

// layersFault says that the kernel refused names or kinds of a layer, not the work as such.
func layersFault(errno syscall.Errno) bool {
	switch errno {
	case syscall.ENAMETOOLONG, syscall.ELOOP, syscall.ENOTDIR, syscall.EISDIR, syscall.ENOENT, syscall.EINVAL, syscall.E2BIG, syscall.ERANGE:
		return true
	default:
		return false
	}
}

// linkToFolder says that a layer has a hard link to a folder.
func linkToFolder(err error) bool {
	_, link := errors.AsType[*os.LinkError](err)
	return link && errors.Is(err, syscall.EPERM)
}

// counter counts what was read, until it is over.
type counter struct {
	r    io.Reader
	n    int64
	over func() error
}

// Read implements io.Reader.
func (c *counter) Read(p []byte) (int, error) {
	if err := c.over(); err != nil {
		return 0, err
	}
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}
