// Package adaptationtest gives a hub the programming interface of NRI's own
// pkg/adaptation, as far as the test suite of that package uses it, so that the suite can
// be run against this hub.
//
// Every call goes the way of a gateway: over gRPC, with the standing stream and the
// generation. The package decides nothing; where the two interfaces differ it translates,
// and each translation says why. Only tests import it.
package adaptationtest
