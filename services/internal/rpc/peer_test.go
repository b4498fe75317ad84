package rpc

import (
	"os"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/crisp-cri/crisp/services/internal/unixsock"
)

func TestPeerCheck(t *testing.T) {
	t.Parallel()
	own := uint32(os.Geteuid())
	const stranger, friend = 4711, 4712
	base := DefaultServerConfig("/x")
	grouped := DefaultServerConfig("/x")
	grouped.Socket.Group, grouped.Socket.Mode = "crisp", 0o660
	open := grouped
	open.Socket.Mode = 0o666
	listed := DefaultServerConfig("/x")
	listed.AllowedUIDs = []uint32{friend}
	for name, tc := range map[string]struct {
		cfg  ServerConfig
		uid  uint32
		want codes.Code
	}{
		"own user":                {base, own, codes.OK},
		"root":                    {base, 0, codes.OK},
		"stranger":                {base, stranger, codes.PermissionDenied},
		"listed":                  {listed, friend, codes.OK},
		"not listed":              {listed, stranger, codes.PermissionDenied},
		"member of the group":     {grouped, stranger, codes.OK},
		"group but open to other": {open, stranger, codes.PermissionDenied},
	} {
		ctx := peer.NewContext(t.Context(), &peer.Peer{
			AuthInfo: peerInfo{credentials.CommonAuthInfo{}, unixsock.Peer{PID: 1, UID: tc.uid}},
		})
		if got := status.Code(newPeerCheck(tc.cfg).check(ctx)); got != tc.want {
			t.Errorf("%s: got %v, want %v", name, got, tc.want)
		}
	}
	if got := status.Code(newPeerCheck(base).check(t.Context())); got != codes.PermissionDenied {
		t.Errorf("unknown caller: got %v", got)
	}
}
