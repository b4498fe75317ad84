package sockets

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
)

// MaxDir is how long the path of the folder may be: the address of a socket has 107 characters,
// of which a shim appends a slash and 64. What a client of an OCI runtime appends to a folder of
// Passing is shorter.
const MaxDir = 106 - 65

// passingID is how many bytes of a digest tell the folders of Passing apart.
const passingID = 16

// Passing makes the folder in which the shim of a sandbox puts files and sockets for its OCI
// runtime: descriptions of execs, the environment in them, and terminals. A shim that is killed
// leaves them there. A bundle's path would be too long for a socket. Without a folder of sockets
// there is none, and the path is empty.
func (s *Sweeper) Passing(sandboxID string) (string, error) {
	if s.dir == "" {
		return "", nil
	}
	dir := s.passing(sandboxID)
	return dir, os.MkdirAll(dir, 0o700)
}

// RemovePassing removes the folder that Passing made, with all that is in it, if there is one. The
// shim must be gone.
func (s *Sweeper) RemovePassing(sandboxID string) error {
	if s.dir == "" {
		return nil
	}
	return os.RemoveAll(s.passing(sandboxID))
}

func (s *Sweeper) passing(sandboxID string) string {
	sum := sha256.Sum256([]byte(sandboxID))
	return filepath.Join(s.dir, "p"+hex.EncodeToString(sum[:passingID]))
}
