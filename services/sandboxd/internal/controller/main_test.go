package controller_test

import (
	"testing"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

func TestMain(m *testing.M) { testkit.Main(shimtest.Tests{M: m}) }
