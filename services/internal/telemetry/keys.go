package telemetry

// Keys of log attributes and span attributes. One key means one thing everywhere, so
// that a pod can be followed through the logs of all processes.
const (
	KeyService       = "service"
	KeySandboxID     = "sandbox_id"
	KeyContainerID   = "container_id"
	KeyContainerName = "container_name"
	KeyExecID        = "exec_id"
	KeyPodName       = "pod_name"
	KeyPodNamespace  = "pod_namespace"
	KeyPodUID        = "pod_uid"
	KeyImage         = "image"
	KeyPlugin        = "plugin"
	KeyRPC           = "rpc"
	KeyPID           = "pid"
	KeyExitCode      = "exit_code"
	KeySubject       = "subject"
	KeySequence      = "sequence"
	KeyTopic         = "topic"
	KeyError         = "error"
	KeyTraceID       = "trace_id"
	KeySpanID        = "span_id"
)
