// Package decode turns the content of layers into tar archives: by decompression, and by
// programs of the operator for media types of their own, such as those of encrypted layers. The
// programs have the form of containerd's stream processors.
//
// A program whose work is not wanted any more is killed with all that it has started, and so is
// one that gets no further. What it writes to its standard error is kept in part only. A
// Decoder is never changed and safe for concurrent use. The package does not check what a
// program makes of a layer; who extracts it compares the digest.
package decode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// payloadType is the type of what decryption programs are told, in the form of the imgcrypt
// project.
const payloadType = "io.containerd.ocicrypt.v1.Payload"

// Program is a program that turns layers of some media types into another.
type Program struct {
	// Name is its name in the configuration.
	Name string
	// Accepts are the media types that it takes, Returns is the one that it makes of them.
	Accepts []string
	Returns string
	// Path is its file, or a name that is looked for in PATH.
	Path string
	Args []string
	// Env is added to the environment of the process, as NAME=value.
	Env []string
}

// Config says what layers are decoded with.
type Config struct {
	Programs []Program
	// NodeKeys tells the programs what they need for the decryption with keys of the node.
	NodeKeys bool
	// Patience is how long a program may neither read nor write; 0 means for ever.
	Patience time.Duration
}

// Decoder turns the content of layers into tar archives.
type Decoder struct{ cfg Config }

// New returns a decoder.
func New(cfg Config) *Decoder { return &Decoder{cfg} }

// Error is the failure of a program, or the lack of one. What is at fault is the node more
// often than the layer.
type Error struct {
	program string // empty: none accepts the layer
	cause   error
}

// Error implements error.
func (e *Error) Error() string {
	if e.program == "" {
		return e.cause.Error()
	}
	return fmt.Sprintf("stream processor %q: %v", e.program, e.cause)
}

// Kind is ErrFailedPrecondition.
func (e *Error) Kind() error { return errdefs.ErrFailedPrecondition }

// Unwrap returns the kind before the cause: who looks for one takes the first.
func (e *Error) Unwrap() []error { return []error{e.Kind(), e.cause} }

// Tar returns the tar archive that a layer with the content r is. The caller owes a Close, which
// ends the programs; r is not used after it. An archive that was read to its end is whole: a
// program that fails later than its last byte is an error of the read that would have returned
// io.EOF. Errors here and of reads: [Error], those of r, and of the decompression.
func (d *Decoder) Tar(ctx context.Context, desc ocispec.Descriptor, r io.Reader) (io.ReadCloser, error) {
	c := &chain{StreamProcessor: diff.NewProcessorChain(desc.MediaType, r)}
	left := slices.Clone(d.cfg.Programs)
	for c.MediaType() != ocispec.MediaTypeImageLayer {
		next, err := d.step(ctx, desc, c.StreamProcessor, &left)
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		c.StreamProcessor = next
		c.steps = append(c.steps, next)
	}
	return c, nil
}

// step turns a stream into the next one. A program takes part once at most.
func (d *Decoder) step(ctx context.Context, desc ocispec.Descriptor, from diff.StreamProcessor, left *[]Program) (diff.StreamProcessor, error) {
	mediaType := from.MediaType()
	i := slices.IndexFunc(*left, func(p Program) bool { return slices.Contains(p.Accepts, mediaType) })
	if i >= 0 {
		p := (*left)[i]
		*left = slices.Delete(*left, i, i+1)
		var told []byte
		if d.cfg.NodeKeys {
			var err error
			if told, err = payload(desc); err != nil {
				return nil, &Error{p.Name, err}
			}
		}
		return start(ctx, p, from, told, d.cfg.Patience)
	}
	err := diff.ErrNoProcessor
	if plain(mediaType) {
		var next diff.StreamProcessor
		if next, err = diff.GetProcessor(ctx, from, nil); err == nil { // decompression
			return next, nil
		}
	}
	if errors.Is(err, diff.ErrNoProcessor) {
		return nil, &Error{cause: fmt.Errorf("no stream processor accepts layers of type %q", mediaType)}
	}
	return nil, fmt.Errorf("layer of type %q: %w", mediaType, err)
}

// plain says that a media type needs no program. The library would take a type with a suffix
// that it does not know for what is in front of it.
func plain(mediaType string) bool {
	base, suffix, wrapped := strings.Cut(mediaType, "+")
	switch base {
	case ocispec.MediaTypeImageLayer, ocispec.MediaTypeImageLayerNonDistributable: //nolint:staticcheck // such images are still pulled
		return !wrapped || suffix == "gzip" || suffix == "zstd"
	default:
		return !wrapped
	}
}

// payload is what a decryption program is told: the layer, whose annotations hold its wrapped
// keys, and that there are no keys besides those of the node.
func payload(desc ocispec.Descriptor) ([]byte, error) {
	value, err := json.Marshal(struct {
		DecryptConfig struct{ Parameters map[string][][]byte }
		Descriptor    ocispec.Descriptor
	}{Descriptor: desc})
	if err != nil {
		return nil, err
	}
	return proto.Marshal(&anypb.Any{TypeUrl: payloadType, Value: value})
}

// chain is a stream with those that it is made of.
type chain struct {
	diff.StreamProcessor

	steps []diff.StreamProcessor
}

// Read implements io.Reader. A decompressor that is a process of its own tells only that its
// input ended early; why is what counts.
func (c *chain) Read(p []byte) (int, error) {
	n, err := c.StreamProcessor.Read(p)
	if err == nil || err == io.EOF { //nolint:errorlint // the end of a stream is not wrapped
		return n, err
	}
	for _, s := range c.steps {
		if p, ok := s.(*program); ok {
			if end := p.outcome.Load(); end != nil && *end != io.EOF { //nolint:errorlint // as above
				return n, *end
			}
		}
	}
	return n, err
}

// Close ends all steps, first those that the others read from, so that none is waited for in vain.
func (c *chain) Close() error {
	var errs []error
	for _, s := range c.steps {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}
