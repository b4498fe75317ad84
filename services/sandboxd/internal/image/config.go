package image

import (
	"context"
	"time"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/decode"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/progress"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/verify"
)

// Config says how images are pulled and shown.
type Config struct {
	// HostDirs are folders of registry host configuration; the first that knows a host is
	// taken. They are read at each pull.
	HostDirs []string
	// AuthFile is a file in the form of docker's config.json with credentials for pulls that
	// bring none; empty means none. It is read at each pull.
	AuthFile string
	// MaxConcurrentDownloads bounds the layers of one pull that are fetched at a time;
	// 0 means 3.
	MaxConcurrentDownloads int
	// MaxConcurrentUnpacks bounds the layers of one image that are extracted at a time where the
	// snapshotter allows for it; 0 means 3.
	MaxConcurrentUnpacks int
	// RangeSize is the size in bytes of the ranges in which a big layer is fetched, as many at
	// a time as MaxConcurrentDownloads; 0 means that layers are fetched whole.
	RangeSize int
	// ProgressTimeout ends a pull on which no byte moves; 0 means never.
	ProgressTimeout time.Duration
	// DiscardLayers gives up the blobs of layers when they are unpacked.
	DiscardLayers bool
	// Decode is what layers are decoded with; its Patience is ProgressTimeout.
	Decode decode.Config
	// Verifiers are asked at each pull.
	Verifiers verify.Programs
	// PinnedImages are patterns of full image names that kubelet is asked to keep, see
	// [ParsePattern].
	PinnedImages []string
	// Snapshotters names the snapshotter of each runtime handler, and with "" that of the default
	// one; an empty snapshotter is the default.
	Snapshotters map[string]string
	// Metrics, if set, are told of pulls.
	Metrics *progress.Metrics
	// UserAgent is sent to registries; empty means containerd's.
	UserAgent string
	// OnChange, if set, is told of every image name that was made, changed or removed, with
	// a topic ("/images/create", "/images/update", "/images/delete") and containerd's event.
	// It is called after the change is durable, in order for each name, and must not block.
	// It is also told how far pulls are, with progress.Topic and an ImageProgress.
	OnChange func(ctx context.Context, topic string, event any)
}
