// Package plugin speaks NRI with one plugin: it accepts connections, takes the plugin's
// registration, configures it and gives it to the host (the hub), whose requests it then
// carries.
//
// Connections are served side by side, each with its own time limit, so a silent one
// delays nobody. Between the answer to a registration and Configure a connection is
// never dropped, because plugins wait for Configure without a limit; who is not wanted
// is told so by a failed registration.
//
// Every call makes a span "nri.plugin" and is counted in the metrics. A plugin that does
// not read what it is sent, or breaks the protocol, is disconnected. The package does
// not decide what a failed call means for a request.
package plugin
