package image

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
)

// minIDPrefix is the least number of characters that stand for an image id. Shorter ones
// would too easily be taken for the name of an image that is not on the node.
const minIDPrefix = 12

var hexOnly = regexp.MustCompile(`^[0-9a-f]+$`)

// query is a reference of a caller, understood in each way it can be.
type query struct {
	// digest is set if the reference is a bare id or digest.
	digest string
	// name is the full name with tag or digest.
	name string
	// prefix may be the beginning of an id.
	prefix string
}

// parseQuery understands an id, the beginning of one, a digest or a name.
// Errors: ErrInvalidArgument.
func parseQuery(ref string) (query, error) {
	if d, err := digest.Parse(ref); err == nil {
		return query{digest: d.String()}, nil
	}
	if len(ref) == 64 && hexOnly.MatchString(ref) {
		return query{digest: "sha256:" + ref}, nil
	}
	named, err := parseName(ref)
	if err != nil {
		return query{}, err
	}
	q := query{name: named.String()}
	if len(ref) >= minIDPrefix && hexOnly.MatchString(ref) {
		q.prefix = "sha256:" + ref
	}
	return q, nil
}

// parseName returns the full name of an image: with its registry, and with a tag or a
// digest. A digest makes a tag beside it meaningless. Errors: ErrInvalidArgument.
func parseName(ref string) (reference.Named, error) {
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return nil, fmt.Errorf("image reference %q: %w: %w", ref, err, errdefs.ErrInvalidArgument)
	}
	return named, nil
}

// patterns match names of images.
type patterns []*regexp.Regexp

// newPatterns understands patterns of [Config.PinnedImages]. One that is no regular expression is
// taken by its characters.
func newPatterns(texts []string) patterns {
	out := make(patterns, 0, len(texts))
	for _, text := range texts {
		re, err := ParsePattern(text)
		if err != nil {
			re = regexp.MustCompile("^" + regexp.QuoteMeta(text) + "$")
		}
		out = append(out, re)
	}
	return out
}

// ParsePattern understands a pattern of whole names: a regular expression between slashes, or a
// text in which * stands for any characters.
func ParsePattern(text string) (*regexp.Regexp, error) {
	if len(text) > 1 && strings.HasPrefix(text, "/") && strings.HasSuffix(text, "/") {
		return regexp.Compile("^(?:" + text[1:len(text)-1] + ")$")
	}
	parts := strings.Split(text, "*")
	for i := range parts {
		parts[i] = regexp.QuoteMeta(parts[i])
	}
	return regexp.Compile("^" + strings.Join(parts, ".*") + "$")
}

func (p patterns) match(names ...string) bool {
	return slices.ContainsFunc(p, func(re *regexp.Regexp) bool {
		return slices.ContainsFunc(names, re.MatchString)
	})
}
