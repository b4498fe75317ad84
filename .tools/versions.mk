# Every program that is built from somebody else's module, with its version.
# Changing a line here rebuilds that program at the next `make parts`.
# The tools of the developer (buf, golangci-lint, gotestsum) are pinned by go.mod in this folder,
# the conformance suite by tests/critest/go.mod, kubelet by kubelet/go.mod in this folder.

RUNC_VERSION   := v1.5.2
SHIM_VERSION   := v2.4.2
CRICTL_VERSION := v1.37.0
CNI_VERSION    := v1.10.0

# Packages below github.com/containernetworking/plugins/plugins.
CNI_PLUGINS := main/bridge main/loopback ipam/host-local meta/bandwidth meta/firewall meta/portmap meta/tuning
