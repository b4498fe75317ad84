// Package hub decides which plugin is told what, when, and what its answer means.
//
// It puts the parts below it together and knows what each request of the gateway is about
// and what is made of the answers to it. From the ground up: plug is what a plugin is; object
// the pods and containers; member one plugin in the hub; roster all of them and the rules; vet
// what they may; outward the way to the gateway; call a single call; dispatch the way of a
// request along the plugins; join how a plugin comes in.
//
// Every plugin gets the stop and the removal of an object once, however often the
// gateway reports them.
//
// No lock is held while a plugin or the gateway is called. All methods of Hub may be
// called concurrently. The package knows neither sockets nor gRPC: plugins, the
// gateway and the synchronisation are interfaces that the packages around it implement.
package hub
