package host

import "testing"

func TestProbe(t *testing.T) {
	t.Parallel()
	h, err := Probe()
	if err != nil {
		t.Fatal(err)
	}
	if h.Hostname == "" || h.HardLimits["RLIMIT_NOFILE"] == 0 {
		t.Errorf("host %+v", h)
	}
}
