package controller_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, goleak.Cleanup(shimtest.Cleanup)) }
