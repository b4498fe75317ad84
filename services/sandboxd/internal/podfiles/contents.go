package podfiles

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"unicode"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	maxHostname = 64   // what the kernel takes
	maxDomain   = 255  // of a search domain
	maxSearch   = 2048 // of all search domains together, as Kubernetes has it
	maxOptions  = 256
)

// contents are the texts of a pod's files.
type contents struct {
	hosts, hostname, resolvConf string
}

func (f *Files) contents(cfg *criv1.PodSandboxConfig) (contents, error) {
	var c contents
	var err error
	onHost := namespaceOptions(cfg).GetNetwork() == criv1.NamespaceMode_NODE
	if c.hosts = hostsFile; onHost {
		if c.hosts, err = f.hostFile("hosts"); err != nil {
			return contents{}, err
		}
	}
	if c.hostname, err = hostname(cfg.GetHostname(), onHost); err != nil {
		return contents{}, err
	}
	if c.resolvConf, err = resolvConf(cfg.GetDnsConfig()); err != nil {
		return contents{}, err
	}
	if c.resolvConf == "" {
		if c.resolvConf, err = f.hostFile("resolv.conf"); err != nil {
			return contents{}, err
		}
	}
	return c, nil
}

// hostFile reads a file of the node; a missing one is empty.
func (f *Files) hostFile(name string) (string, error) {
	file, err := os.Open(filepath.Join(f.cfg.HostEtc, name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer file.Close()
	raw, err := io.ReadAll(io.LimitReader(file, maxHostFile))
	return string(raw), err
}

func hostname(name string, onHost bool) (string, error) {
	if name == "" || onHost {
		var err error
		if name, err = os.Hostname(); err != nil {
			return "", err
		}
	}
	if len(name) > maxHostname || !isWord(name) {
		return "", fmt.Errorf("host name %.80q: too long or with spaces: %w", name, errdefs.ErrInvalidArgument)
	}
	return name + "\n", nil
}

// resolvConf writes a DNS configuration; an empty one gives nothing.
func resolvConf(c *criv1.DNSConfig) (string, error) {
	var out strings.Builder
	if s := c.GetSearches(); len(s) > 0 {
		line, err := words("search", s, maxDomain)
		if err != nil {
			return "", err
		}
		if len(line) > maxSearch+len("search \n") {
			return "", fmt.Errorf("DNS search domains of %d characters, at most %d are possible: %w",
				len(line), maxSearch, errdefs.ErrInvalidArgument)
		}
		out.WriteString(line)
	}
	for _, s := range c.GetServers() {
		if _, err := netip.ParseAddr(s); err != nil {
			return "", fmt.Errorf("DNS server %.80q is not an address: %w", s, errdefs.ErrInvalidArgument)
		}
		out.WriteString("nameserver " + s + "\n")
	}
	if o := c.GetOptions(); len(o) > 0 {
		line, err := words("options", o, maxOptions)
		if err != nil {
			return "", err
		}
		out.WriteString(line)
	}
	return out.String(), nil
}

// words writes a line of words, each of which must be one word and not too long.
func words(keyword string, list []string, longest int) (string, error) {
	for _, w := range list {
		if len(w) > longest || !isWord(w) {
			return "", fmt.Errorf("DNS %s %.80q: too long, empty or with spaces: %w", keyword, w, errdefs.ErrInvalidArgument)
		}
	}
	return keyword + " " + strings.Join(list, " ") + "\n", nil
}

func isWord(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return unicode.IsSpace(r) || unicode.IsControl(r) || r == unicode.ReplacementChar
	})
}
