//go:build integration

package crispshim_test

import (
	"os"
	"testing"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

func TestMain(m *testing.M) {
	os.Exit(shimtest.Tests{M: m}.Run())
}
