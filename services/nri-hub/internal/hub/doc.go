// Package hub decides which plugin is told what, when, and what its answer means.
//
// It keeps the connected plugins in the order of (index, name) and passes each request
// of the gateway along that order. A plugin has one request in flight at a time, and
// requests reach all plugins in the same order; different plugins work on different
// requests at the same time, so a slow plugin does not stop the others.
//
// A plugin that joins is synchronised while requests go on. What happens meanwhile is
// kept for it and delivered right after, in order, so that it learns of every pod and
// container either from its synchronisation or by an event, and nobody waits for it
// longer than for a plugin that answers slowly (Config.JoinWait).
//
// Every plugin gets the stop and the removal of an object once, however often the
// gateway reports them.
//
// No lock is held while a plugin or the gateway is called. All methods of Hub may be
// called concurrently. The package knows neither sockets nor gRPC: plugins, the
// gateway and the synchronisation are interfaces that the packages around it implement.
package hub
