// Package bench measures what a caller of CRI waits for, beside containerd's CRI plugin in the
// same run and in turns: the steps of a pod's life, and what NRI plugins add to a
// CreateContainer. The measurements need root and the build tag bench; there is no code outside
// of them.
package bench
