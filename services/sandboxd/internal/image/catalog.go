package image

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"

	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/assembly"
)

// entry is an image with all its names. It is never changed, only replaced.
type entry struct {
	*assembly.Contents
	names   []string // all names in the database
	digests []string // of the roots, in the form of bare digests
	shown   *criv1.Image
}

// catalog is a consistent view of all images.
type catalog struct {
	entries []*entry // by id, ascending
	byID    map[string]*entry
	byName  map[string]*entry
}

// find looks an image up.
func (c *catalog) find(q query) *entry {
	if q.digest != "" {
		if e := c.byID[q.digest]; e != nil {
			return e
		}
		for _, e := range c.entries {
			if slices.Contains(e.digests, q.digest) {
				return e
			}
		}
		return nil
	}
	if e := c.byName[q.name]; e != nil || q.prefix == "" {
		return e
	}
	var found *entry
	for _, e := range c.entries {
		if strings.HasPrefix(e.ID, q.prefix) {
			if found != nil {
				return nil // ambiguous
			}
			found = e
		}
	}
	return found
}

// reload builds the catalog anew from the database. Images that cannot be read are left out:
// a pull repairs them.
func (s *Service) reload(ctx context.Context) error {
	s.reloading.Lock()
	defer s.reloading.Unlock()
	records, err := s.st.Images().List(ctx)
	if err != nil {
		return fmt.Errorf("images: %w", err)
	}
	next := &catalog{byID: make(map[string]*entry), byName: make(map[string]*entry)}
	known := make(map[digest.Digest]*assembly.Contents)
	for _, r := range records {
		c := s.known[r.Target.Digest]
		if c == nil {
			if c, err = assembly.Read(ctx, s.st.Content(), r.Target); err != nil {
				s.log.WarnContext(ctx, "image not readable", slog.String("image", r.Name), slog.Any("error", err))
				continue
			}
		}
		known[r.Target.Digest] = c
		e := next.byID[c.ID]
		if e == nil {
			e = &entry{Contents: c}
			next.byID[c.ID] = e
			next.entries = append(next.entries, e)
		}
		e.names = append(e.names, r.Name)
		if d := r.Target.Digest.String(); !slices.Contains(e.digests, d) {
			e.digests = append(e.digests, d)
		}
		next.byName[r.Name] = e
	}
	slices.SortFunc(next.entries, func(a, b *entry) int { return strings.Compare(a.ID, b.ID) })
	for _, e := range next.entries {
		e.shown = s.show(e)
	}
	s.known = known
	s.catalog.Store(next)
	return nil
}

// show makes the form of an image that callers see.
func (s *Service) show(e *entry) *criv1.Image {
	img := &criv1.Image{Id: e.ID, Size: e.Size, Spec: &criv1.ImageSpec{Image: e.ID}}
	slices.Sort(e.names)
	for _, n := range e.names {
		named, err := reference.ParseNormalizedNamed(n)
		if err != nil || n == e.ID {
			continue
		}
		if _, ok := named.(reference.Digested); ok {
			img.RepoDigests = append(img.RepoDigests, n)
		} else {
			img.RepoTags = append(img.RepoTags, n)
		}
	}
	img.Uid, img.Username = userOf(e.Config.Config.User)
	img.Pinned = s.conf.Load().pinned.match(e.names...)
	return img
}

// userOf splits the user of an image configuration ("user[:group]") into what callers want.
func userOf(user string) (*criv1.Int64Value, string) {
	user, _, _ = strings.Cut(user, ":")
	if uid, err := strconv.ParseInt(user, 10, 64); err == nil {
		return &criv1.Int64Value{Value: uid}, ""
	}
	return nil, user
}

// verbose returns what only a curious caller wants to know.
func (e *entry) verbose() (map[string]string, error) {
	info, err := json.Marshal(struct {
		ChainID string        `json:"chainID"`
		Spec    ocispec.Image `json:"imageSpec"`
	}{e.ChainID(), e.Config})
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", e.ID, err)
	}
	return map[string]string{"info": string(info)}, nil
}
