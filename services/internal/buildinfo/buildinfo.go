// Package buildinfo says what this binary was built from. It reads what the Go
// linker recorded and nothing else: no build flags are needed for it to work.
package buildinfo

import (
	"fmt"
	"runtime/debug"
)

// Info describes the running binary. Fields that were not recorded hold "unknown".
type Info struct {
	// Version is the version of the main module, "(devel)" for a build from a checkout.
	Version string
	// Commit is the full revision of the checkout.
	Commit string
	// Modified says that the checkout had uncommitted changes.
	Modified bool
	// Go is the version of the Go toolchain.
	Go string
}

// Read returns what is known about the running binary.
func Read() Info {
	build, ok := debug.ReadBuildInfo()
	if !ok {
		return Info{Version: "unknown", Commit: "unknown", Go: "unknown"}
	}
	return fromBuild(build)
}

func fromBuild(build *debug.BuildInfo) Info {
	info := Info{Version: build.Main.Version, Commit: "unknown", Go: build.GoVersion}
	if info.Version == "" {
		info.Version = "unknown"
	}
	for _, s := range build.Settings {
		switch s.Key {
		case "vcs.revision":
			info.Commit = s.Value
		case "vcs.modified":
			info.Modified = s.Value == "true"
		}
	}
	return info
}

// String returns one line for people, such as "v1.2.0 (commit 0123456789ab, go1.26.8)".
func (i Info) String() string {
	commit := i.Commit
	if len(commit) > 12 {
		commit = commit[:12]
	}
	if i.Modified {
		commit += ", modified"
	}
	return fmt.Sprintf("%s (commit %s, %s)", i.Version, commit, i.Go)
}
