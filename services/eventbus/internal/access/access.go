// Package access says who may use the bus and for what.
//
// Each role has an nkey pair. Its seed lies in a file that only the members of one
// group can read: who can read the seed is the role. The seeds are made at the first
// start and never changed afterwards. The bus itself uses a pair that exists only in
// memory. The package grants nothing beyond what the roles need for one stream: nobody
// but the bus may create, change, purge or delete streams.
package access

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	natsd "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/unixsock"
)

const (
	dirMode  fs.FileMode = 0o750
	fileMode fs.FileMode = 0o640
)

// Role is a kind of client.
type Role string

// The roles. Sandboxd publishes, the hub only its audit trail; all others read.
const (
	Sandboxd Role = "sandboxd"
	Gateway  Role = "gateway"
	Hub      Role = "hub"
	Tail     Role = "tail"
)

// Roles returns all roles.
func Roles() []Role { return []Role{Sandboxd, Gateway, Hub, Tail} }

// Config is the section "access" of the configuration file.
type Config struct {
	KeysDir string `toml:"keys_dir" comment:"Folder of the seed files <role>.nk (sandboxd, gateway, hub, tail). Missing ones are made at start."`
	Owner   string `toml:"owner" comment:"User (name or number) that owns the folder and the files; empty: the user of the process."`
	Group   string `toml:"group" comment:"Group (name or number) that may read the seeds; empty: the group of the process."`
}

// Validate implements config.Validator.
func (c Config) Validate() error {
	if !filepath.IsAbs(c.KeysDir) {
		return fmt.Errorf("keys_dir: %q is not absolute, write for example \"/var/lib/crisp/eventbus/keys\"", c.KeysDir)
	}
	return nil
}

// SeedFile returns where the seed of a role lies.
func (c Config) SeedFile(role Role) string { return filepath.Join(c.KeysDir, string(role)+".nk") }

// Keys are the pairs of all roles and of the bus itself.
type Keys struct {
	public map[Role]string
	own    nkeys.KeyPair
}

// Open reads the seeds and makes those that are missing. A file that holds no seed is
// an error: replacing it would lock out a client that still has it.
func Open(cfg Config) (*Keys, error) {
	if err := os.MkdirAll(cfg.KeysDir, dirMode); err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	if err := unixsock.SetAccess(cfg.KeysDir, cfg.Owner, cfg.Group, dirMode); err != nil {
		return nil, fmt.Errorf("keys %s: %w", cfg.KeysDir, err)
	}
	keys := &Keys{public: make(map[Role]string)}
	for _, role := range Roles() {
		public, err := ensure(cfg, role)
		if err != nil {
			return nil, fmt.Errorf("key of %s: %w", role, err)
		}
		keys.public[role] = public
	}
	var err error
	if keys.own, err = nkeys.CreateUser(); err != nil {
		return nil, fmt.Errorf("key of the bus: %w", err)
	}
	return keys, nil
}

// Own returns the public key of the bus itself and the function that signs with it.
func (k *Keys) Own() (public string, sign func([]byte) ([]byte, error), err error) {
	public, err = k.own.PublicKey()
	return public, k.own.Sign, err
}

// Users returns the users of the server, with their permissions for the named stream.
// Anybody else is refused.
func (k *Keys) Users(stream string) ([]*natsd.NkeyUser, error) {
	own, err := k.own.PublicKey()
	if err != nil {
		return nil, fmt.Errorf("key of the bus: %w", err)
	}
	users := []*natsd.NkeyUser{{Nkey: own}}
	for _, role := range Roles() {
		users = append(users, &natsd.NkeyUser{Nkey: k.public[role], Permissions: permissions(role, stream)})
	}
	return users, nil
}

func permissions(role Role, stream string) *natsd.Permissions {
	p := &natsd.Permissions{
		Publish:   &natsd.SubjectPermission{Allow: consume(stream)},
		Subscribe: &natsd.SubjectPermission{Allow: []string{"_INBOX.>"}},
	}
	switch role {
	case Sandboxd:
		p.Publish.Allow = []string{events.SubjectPrefix + ".>"}
	case Hub:
		// What plugins change, and nothing that says what containers do.
		p.Publish.Allow = append(p.Publish.Allow, events.SubjectPrefix+".*.*.nri.audit")
	default:
	}
	return p
}

// consume lists the requests with which a reader finds the stream, keeps and removes
// consumers of its own, and fetches and acknowledges messages.
func consume(stream string) []string {
	return []string{
		"$JS.API.STREAM.INFO." + stream,
		"$JS.API.CONSUMER.INFO." + stream + ".>",
		"$JS.API.CONSUMER.CREATE." + stream,
		"$JS.API.CONSUMER.CREATE." + stream + ".>",
		"$JS.API.CONSUMER.DURABLE.CREATE." + stream + ".>",
		"$JS.API.CONSUMER.DELETE." + stream + ".>",
		"$JS.API.CONSUMER.MSG.NEXT." + stream + ".>",
		"$JS.ACK." + stream + ".>",
	}
}

func ensure(cfg Config, role Role) (public string, err error) {
	path := cfg.SeedFile(role)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return create(cfg, path)
	}
	if err != nil {
		return "", err
	}
	pair, err := nkeys.ParseDecoratedNKey(text)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	defer pair.Wipe()
	return pair.PublicKey()
}

// create writes a new seed under a temporary name first, so that a reader never finds
// half of one.
func create(cfg Config, path string) (public string, err error) {
	pair, err := nkeys.CreateUser()
	if err != nil {
		return "", err
	}
	defer pair.Wipe()
	seed, err := pair.Seed()
	if err != nil {
		return "", err
	}
	if public, err = pair.PublicKey(); err != nil {
		return "", err
	}
	tmp := path + ".new"
	if err := write(tmp, append(seed, '\n')); err != nil {
		return "", err
	}
	if err := unixsock.SetAccess(tmp, cfg.Owner, cfg.Group, fileMode); err != nil {
		return "", err
	}
	return public, os.Rename(tmp, path)
}

func write(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Sync(), f.Close())
}
