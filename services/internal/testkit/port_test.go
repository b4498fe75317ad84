package testkit_test

import (
	"net"
	"testing"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestReservedPortIsListenedOnAgainAndAgain(t *testing.T) {
	t.Parallel()
	addr := testkit.ReservePort(t)
	for range 3 {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}

// As many reservations, listeners and connections as would meet a port that is not held: all others have other ports.
func TestReservedPortIsGivenToNobodyElse(t *testing.T) {
	t.Parallel()
	held := testkit.ReservePort(t)
	for range 2000 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		if l.Addr().String() == held {
			t.Fatalf("%s was given to a listener", held)
		}
	}
}
