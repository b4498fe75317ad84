package access_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	natsd "github.com/nats-io/nats-server/v2/server"

	"github.com/crisp-cri/crisp/services/eventbus/internal/access"
)

func names(t *testing.T, cfg access.Config) []string {
	t.Helper()
	keys, err := access.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	users, err := keys.Users("S")
	if err != nil {
		t.Fatal(err)
	}
	own, _, err := keys.Own()
	if err != nil {
		t.Fatal(err)
	}
	if users[0].Nkey != own || users[0].Permissions != nil {
		t.Errorf("the first user is %+v, not the bus with all rights", users[0])
	}
	var out []string
	for _, u := range users[1:] {
		out = append(out, u.Nkey)
	}
	return out
}

func TestKeysAreMadeOnce(t *testing.T) {
	t.Parallel()
	cfg := access.Config{KeysDir: filepath.Join(t.TempDir(), "a", "keys")}
	first := names(t, cfg)
	if len(first) != len(access.Roles()) {
		t.Fatalf("%d users", len(first))
	}
	if again := names(t, cfg); !slices.Equal(first, again) {
		t.Error("the keys changed at the second start")
	}
	if err := os.Remove(cfg.SeedFile(access.Hub)); err != nil {
		t.Fatal(err)
	}
	third := names(t, cfg)
	for i, role := range access.Roles() {
		if same := third[i] == first[i]; same != (role != access.Hub) {
			t.Errorf("%s: same key is %v after the hub's was removed", role, same)
		}
	}
}

func TestBrokenSeedIsNotReplaced(t *testing.T) {
	t.Parallel()
	cfg := access.Config{KeysDir: t.TempDir()}
	if err := os.WriteFile(cfg.SeedFile(access.Gateway), []byte("oops"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := access.Open(cfg); err == nil {
		t.Error("a broken seed was accepted or replaced")
	}
	if _, err := access.Open(access.Config{KeysDir: t.TempDir(), Group: "no-such-group"}); err == nil {
		t.Error("an unknown group was ignored")
	}
}

func TestOnlySandboxdPublishes(t *testing.T) {
	t.Parallel()
	keys, err := access.Open(access.Config{KeysDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	users, err := keys.Users("S")
	if err != nil {
		t.Fatal(err)
	}
	publishes := func(u *natsd.NkeyUser, subject string) bool {
		return slices.Contains(u.Permissions.Publish.Allow, subject)
	}
	for i, role := range access.Roles() {
		u := users[i+1]
		if got := publishes(u, "crisp.v1.>"); got != (role == access.Sandboxd) {
			t.Errorf("%s publishes events: %v", role, got)
		}
		if got := publishes(u, "$JS.API.CONSUMER.MSG.NEXT.S.>"); got != (role != access.Sandboxd) {
			t.Errorf("%s reads events: %v", role, got)
		}
	}
}
