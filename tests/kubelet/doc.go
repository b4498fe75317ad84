// Package kubelet runs a real kubelet on the four processes: without a control plane, with static
// pods, and asks kubelet itself what became of them. The stories need root, the program kubelet
// (`make test-kubelet` builds it) and the build tag kubelet; there is no code outside of them.
package kubelet
