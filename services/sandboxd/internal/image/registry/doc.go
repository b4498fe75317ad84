// Package registry talks to image registries: it finds hosts and mirrors, proves who asks,
// resolves names, and brings manifests and blobs into a content store.
//
// What it stores has the digest that was asked for, whatever a registry says. Credentials
// are sent to the host they are for and to no other. Requests are repeated a bounded number
// of times, and a pull on which no byte moves is given up. It knows nothing of snapshots,
// image names of the node or the container runtime interface, apart from the form in which
// credentials are handed over.
package registry
