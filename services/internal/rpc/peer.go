package rpc

import (
	"context"
	"net"
	"os"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/crisp-cri/crisp/services/internal/unixsock"
)

const peerProtocol = "unix-peer"

// peerInfo is what the handshake leaves in the context of each call.
type peerInfo struct {
	credentials.CommonAuthInfo

	peer unixsock.Peer
}

func (peerInfo) AuthType() string { return peerProtocol }

// peerCredentials are transport credentials that change nothing on the wire and ask the
// kernel who connected. A connection that is not a unix socket has no peer.
type peerCredentials struct{}

func (peerCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if p, err := unixsock.PeerOf(conn); err == nil {
		return conn, peerInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, p}, nil
	}
	// A connection without a peer is no failed handshake: the peer check refuses its calls.
	return conn, noPeerInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}}, nil
}

// noPeerInfo marks a connection of which the kernel knows no peer.
type noPeerInfo struct {
	credentials.CommonAuthInfo
}

func (noPeerInfo) AuthType() string { return "none" }

func (peerCredentials) ClientHandshake(_ context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return conn, noPeerInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}}, nil
}

func (peerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: peerProtocol}
}

func (c peerCredentials) Clone() credentials.TransportCredentials { return c }

func (peerCredentials) OverrideServerName(string) error { return nil }

// PeerFromContext returns the process that made the call, false if it is not known.
func PeerFromContext(ctx context.Context) (unixsock.Peer, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return unixsock.Peer{}, false
	}
	info, ok := p.AuthInfo.(peerInfo)
	return info.peer, ok
}

// peerCheck refuses calls of users that are not allowed.
type peerCheck struct {
	allowed []uint32
	// byKernel says that who passes the file mode of the socket may call.
	byKernel bool
}

func newPeerCheck(cfg ServerConfig) peerCheck {
	const others = 0o006
	return peerCheck{
		allowed:  append([]uint32{0, uint32(os.Geteuid())}, cfg.AllowedUIDs...),
		byKernel: cfg.Socket.Group != "" && cfg.Socket.Mode&others == 0,
	}
}

func (c peerCheck) check(ctx context.Context) error {
	p, ok := PeerFromContext(ctx)
	if !ok {
		return status.Error(codes.PermissionDenied, "the caller is not known")
	}
	if c.byKernel || slices.Contains(c.allowed, p.UID) {
		return nil
	}
	return status.Errorf(codes.PermissionDenied, "user %d (process %d) may not call", p.UID, p.PID)
}
