// Package login proves to image registries who is asking: credentials of a pull request or of a
// file, the challenges of servers, and tokens of token services.
//
// Credentials are sent to the host they are for and to no other, and no error shows them.
package login
