package cli

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

const (
	healthTimeout = 3 * time.Second
	healthText    = 4 << 10
)

// health asks the running process whether it is ready, by the admin listener that the
// configuration names.
func health[C any](ctx context.Context, p Program[C], args []string, stderr io.Writer) error {
	cfg, err := parse(p, "health", args, stderr)
	if err != nil {
		return ignoreHelp(err)
	}
	address := p.Admin(cfg)
	if address == "" {
		return fmt.Errorf("admin.listen is empty, so there is nobody to ask: %w", errdefs.ErrFailedPrecondition)
	}
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/readyz", nil)
	if err != nil {
		return fmt.Errorf("admin.listen %q: %w: %w", address, err, errdefs.ErrInvalidArgument)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("not healthy: %w: %w", err, errdefs.ErrUnavailable)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode == http.StatusOK {
		return nil
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, healthText))
	if err != nil {
		return fmt.Errorf("not ready: %s: %w: %w", resp.Status, err, errdefs.ErrUnavailable)
	}
	return fmt.Errorf("not ready: %s: %w", strings.TrimSpace(string(text)), errdefs.ErrUnavailable)
}
