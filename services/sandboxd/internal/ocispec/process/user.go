package process

import (
	"bytes"
	"fmt"
	"iter"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// SetUser sets user and groups of the first process and returns them in CRI's form. imageUser
// is what the image says, accounts are the image's. Errors: ErrInvalidArgument.
func SetUser(p *specs.Process, sc *criv1.LinuxContainerSecurityContext, imageUser string, of pod.Accounts) (*criv1.ContainerUser, error) {
	name, group, err := userAndGroup(sc, imageUser)
	if err != nil {
		return nil, err
	}
	accounts := accounts{passwd: of.Passwd, group: of.Group}
	uid, gid, login, err := accounts.lookUp(name, group)
	if err != nil {
		return nil, err
	}
	groups := []uint32{gid}
	if sc.GetSupplementalGroupsPolicy() == criv1.SupplementalGroupsPolicy_Merge {
		for _, g := range accounts.groupsOf(login) {
			groups = appendNew(groups, g)
		}
	}
	groups, err = supplemental(groups, sc.GetSupplementalGroups())
	if err != nil {
		return nil, err
	}
	p.User = specs.User{UID: uid, GID: gid, AdditionalGids: groups, Umask: p.User.Umask}
	return containerUser(p.User), nil
}

// maxGroups is how many groups the kernel lets a process have.
const maxGroups = 65536

// supplemental adds the groups that a request lists.
func supplemental(groups []uint32, asked []int64) ([]uint32, error) {
	if n := len(groups) + len(asked); n > maxGroups {
		return nil, fmt.Errorf("%d groups, at most %d are possible: %w", n, maxGroups, errdefs.ErrInvalidArgument)
	}
	for _, g := range asked {
		n, err := accountID(g)
		if err != nil {
			return nil, fmt.Errorf("supplemental group %d: %w", g, err)
		}
		groups = appendNew(groups, n)
	}
	return groups, nil
}

// containerUser is a user in CRI's form.
func containerUser(u specs.User) *criv1.ContainerUser {
	out := &criv1.LinuxContainerUser{Uid: int64(u.UID), Gid: int64(u.GID)}
	for _, g := range u.AdditionalGids {
		out.SupplementalGroups = append(out.SupplementalGroups, int64(g))
	}
	return &criv1.ContainerUser{Linux: out}
}

// userAndGroup picks user and group from the request, else from the image. A numeric user
// of the request wins over a named one. An empty group means the user's own.
func userAndGroup(sc *criv1.LinuxContainerSecurityContext, image string) (user, group string, err error) {
	user = sc.GetRunAsUsername()
	if sc.GetRunAsUser() != nil {
		if _, err := accountID(sc.GetRunAsUser().GetValue()); err != nil {
			return "", "", fmt.Errorf("user %d: %w", sc.GetRunAsUser().GetValue(), err)
		}
		user = strconv.FormatInt(sc.GetRunAsUser().GetValue(), 10)
	}
	if sc.GetRunAsGroup() != nil {
		if _, err := accountID(sc.GetRunAsGroup().GetValue()); err != nil {
			return "", "", fmt.Errorf("group %d: %w", sc.GetRunAsGroup().GetValue(), err)
		}
		if user == "" {
			return "", "", fmt.Errorf("group %d is given without a user: %w",
				sc.GetRunAsGroup().GetValue(), errdefs.ErrInvalidArgument)
		}
		group = strconv.FormatInt(sc.GetRunAsGroup().GetValue(), 10)
	}
	if user == "" {
		user, group, _ = strings.Cut(image, ":")
	}
	return user, group, nil
}

func accountID(n int64) (uint32, error) {
	if n < 0 || n > math.MaxUint32-1 {
		return 0, fmt.Errorf("out of range: %w", errdefs.ErrInvalidArgument)
	}
	return uint32(n), nil
}

// accounts are an image's user and group files.
type accounts struct {
	passwd, group []byte
}

// lookUp finds the ids of a user and a group, each given as a name or a number. A number
// needs no entry; a name does. The login name is empty if there is no entry for the user.
func (a accounts) lookUp(user, group string) (uid, gid uint32, login string, err error) {
	number, isNumber := number(user)
	if user == "" {
		number, isNumber = 0, true
	}
	uid = number
	found := false
	for f := range records(a.passwd, 4) {
		entryUID, ok := numberOf(f[2])
		if !ok || (f[0] != user && (!isNumber || entryUID != number)) {
			continue
		}
		entryGID, ok := numberOf(f[3])
		if !ok {
			continue
		}
		uid, gid, login, found = entryUID, entryGID, f[0], true
		break
	}
	if !found && !isNumber {
		return 0, 0, "", fmt.Errorf("user %q is not in the image's /etc/passwd: %w", user, errdefs.ErrInvalidArgument)
	}
	if group == "" {
		return uid, gid, login, nil
	}
	gid, err = a.lookUpGroup(group)
	return uid, gid, login, err
}

func (a accounts) lookUpGroup(group string) (uint32, error) {
	for f := range records(a.group, 3) {
		if gid, ok := numberOf(f[2]); ok && f[0] == group {
			return gid, nil
		}
	}
	if gid, ok := number(group); ok {
		return gid, nil
	}
	return 0, fmt.Errorf("group %q is not in the image's /etc/group: %w", group, errdefs.ErrInvalidArgument)
}

// groupsOf returns the groups that list a user as a member, in the order of the file. The
// group that has the user's own name is not meant: it is the primary one by habit.
func (a accounts) groupsOf(login string) []uint32 {
	var out []uint32
	if login == "" {
		return nil
	}
	for f := range records(a.group, 4) {
		gid, ok := numberOf(f[2])
		if ok && f[0] != login && slices.Contains(strings.Split(f[3], ","), login) {
			out = appendNew(out, gid)
		}
	}
	return out
}

// records yields the fields of every line that has at least n of them. Lines that are no
// records are passed over.
func records(file []byte, n int) iter.Seq[[]string] {
	return func(yield func([]string) bool) {
		for line := range bytes.Lines(file) {
			text := strings.TrimRight(string(line), "\r\n")
			fields := strings.Split(text, ":")
			if text == "" || text[0] == '#' || len(fields) < n || fields[0] == "" {
				continue
			}
			if !yield(fields) {
				return
			}
		}
	}
}

func number(s string) (uint32, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return 0, false
	}
	id, err := accountID(n)
	return id, err == nil
}

func numberOf(field string) (uint32, bool) { return number(strings.TrimSpace(field)) }

func appendNew(list []uint32, n uint32) []uint32 {
	if slices.Contains(list, n) {
		return list
	}
	return append(list, n)
}

// InitUser is the user of the pod's own process. It has no image that could name one.
// Errors: ErrInvalidArgument.
func InitUser(sc *criv1.LinuxSandboxSecurityContext) (specs.User, error) {
	if sc.GetRunAsGroup() != nil && sc.GetRunAsUser() == nil {
		return specs.User{}, fmt.Errorf("group %d is given without a user: %w", sc.GetRunAsGroup().GetValue(), errdefs.ErrInvalidArgument)
	}
	var out specs.User
	for _, id := range []struct {
		what  string
		asked *criv1.Int64Value
		to    *uint32
	}{{"user", sc.GetRunAsUser(), &out.UID}, {"group", sc.GetRunAsGroup(), &out.GID}} {
		if id.asked == nil {
			continue
		}
		n, err := accountID(id.asked.GetValue())
		if err != nil {
			return specs.User{}, fmt.Errorf("%s %d: %w", id.what, id.asked.GetValue(), err)
		}
		*id.to = n
	}
	groups, err := supplemental(nil, sc.GetSupplementalGroups())
	if err != nil {
		return specs.User{}, err
	}
	out.AdditionalGids = groups
	return out, nil
}
