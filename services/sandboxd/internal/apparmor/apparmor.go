// Package apparmor loads the default AppArmor profile of containers and says which profiles the
// kernel knows. On a host without AppArmor nothing in it is to be called; see
// ocispec.Host. It is safe for concurrent use.
package apparmor

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"github.com/containerd/containerd/v2/contrib/apparmor"
)

// profilesFile lists the loaded profiles, one "name (mode)" a line.
const profilesFile = "/sys/kernel/security/apparmor/profiles"

// LoadDefault makes the default profile under a name and loads it with apparmor_parser, unless
// one of this name is loaded: an administrator may have replaced it.
func LoadDefault(name string) error {
	if err := apparmor.LoadDefaultProfile(name); err != nil {
		return fmt.Errorf("default AppArmor profile %q: %w", name, err)
	}
	return nil
}

// Loaded says whether the kernel knows a profile.
func Loaded(name string) (bool, error) { return listed(profilesFile, name) }

func listed(file, name string) (bool, error) {
	f, err := os.Open(file)
	if err != nil {
		return false, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if have, _, ok := cutLast(lines.Text(), " ("); ok && have == name {
			return true, nil
		}
	}
	return false, lines.Err()
}

// cutLast cuts at the last separator: the name of a profile may hold blanks and brackets.
func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}
