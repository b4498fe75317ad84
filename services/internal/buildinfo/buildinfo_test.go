package buildinfo

import (
	"runtime/debug"
	"testing"
)

func TestInfoOfBuild(t *testing.T) {
	t.Parallel()
	build := &debug.BuildInfo{GoVersion: "go1.26.8", Settings: []debug.BuildSetting{
		{Key: "vcs.revision", Value: "0123456789abcdef0123456789abcdef01234567"}, {Key: "vcs.modified", Value: "true"},
	}}
	build.Main.Version = "v1.2.3"
	const want = "v1.2.3 (commit 0123456789ab, modified, go1.26.8)"
	if got := fromBuild(build).String(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := fromBuild(&debug.BuildInfo{}); got.Version != "unknown" || got.Commit != "unknown" {
		t.Errorf("nothing recorded: got %+v", got)
	}
}
