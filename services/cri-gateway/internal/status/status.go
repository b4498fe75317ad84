// Package status composes what the gateway says of itself and of the node. It is pure:
// whoever uses it asks the backends and passes in what they said.
package status

import (
	"strings"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
)

const (
	// RuntimeName is the name by which the runtime is known to kubelet and plugins.
	RuntimeName = "crisp"

	apiVersion = "v1"
	// versionOfVersion is the version of the Version call itself, fixed by kubelet.
	versionOfVersion = "0.1.0"
	// unreleased stands for the version of a build that has none. kubelet insists on
	// something that parses as a version.
	unreleased = "0.0.0-devel"

	unreachable = "SandboxdUnavailable"
)

// RuntimeVersion turns the version that a binary was built with into one that kubelet
// accepts; it is never empty.
func RuntimeVersion(built string) string {
	v := strings.TrimPrefix(built, "v")
	if v == "" || v[0] < '0' || v[0] > '9' {
		return unreleased
	}
	return v
}

// Version returns the answer to Version for a runtime version of RuntimeVersion.
func Version(runtimeVersion string) *criv1.VersionResponse {
	return &criv1.VersionResponse{
		Version:           versionOfVersion,
		RuntimeName:       RuntimeName,
		RuntimeVersion:    runtimeVersion,
		RuntimeApiVersion: apiVersion,
	}
}

// Status returns the answer to Status from what sandboxd said. With a failure instead
// of an answer, the node is not ready and the failure is the reason.
func Status(node *nodev1.GetStatusResponse, failure error) *criv1.StatusResponse {
	if failure != nil {
		return &criv1.StatusResponse{Status: &criv1.RuntimeStatus{Conditions: []*criv1.RuntimeCondition{
			notReady(criv1.RuntimeReady, failure.Error()),
			notReady(criv1.NetworkReady, failure.Error()),
		}}}
	}
	conditions := node.GetConditions()
	for _, required := range []string{criv1.RuntimeReady, criv1.NetworkReady} {
		if !has(conditions, required) {
			conditions = append(conditions, notReady(required, "sandboxd did not say"))
		}
	}
	return &criv1.StatusResponse{
		Status:          &criv1.RuntimeStatus{Conditions: conditions},
		Info:            node.GetInfo(),
		RuntimeHandlers: node.GetRuntimeHandlers(),
		Features:        node.GetFeatures(),
	}
}

func notReady(kind, message string) *criv1.RuntimeCondition {
	return &criv1.RuntimeCondition{Type: kind, Reason: unreachable, Message: message}
}

func has(conditions []*criv1.RuntimeCondition, kind string) bool {
	for _, c := range conditions {
		if c.GetType() == kind {
			return true
		}
	}
	return false
}
