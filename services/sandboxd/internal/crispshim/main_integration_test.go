//go:build integration

package crispshim_test

import (
	"testing"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

func TestMain(m *testing.M) {
	shimtest.Cleanup(m.Run())
}
