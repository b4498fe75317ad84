// Package registry talks to image registries: it finds hosts and mirrors, resolves
// names, and brings manifests and blobs into a content store. Package login proves who asks.
//
// What it stores has the digest that was asked for, whatever a registry says. Requests are
// repeated a bounded number of times, and a pull on which no byte moves is given up. It knows
// nothing of snapshots, image names of the node or the container runtime interface.
package registry
