package ocispec

import (
	"maps"
	"path"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Annotations by which shims, OCI runtimes and tools tell pods and containers apart.
const (
	annotationType          = "io.kubernetes.cri.container-type"
	annotationSandboxName   = "io.kubernetes.cri.sandbox-name"
	annotationSandboxNS     = "io.kubernetes.cri.sandbox-namespace"
	annotationSandboxUID    = "io.kubernetes.cri.sandbox-uid"
	annotationContainerName = "io.kubernetes.cri.container-name"
	annotationImageName     = "io.kubernetes.cri.image-name"

	typeContainer = "container"
	typeSandbox   = "sandbox"
)

func (d *draft) annotations() error {
	out := podAnnotations(d.in.SandboxID, d.in.SandboxConfig, d.in.Handler)
	pass(out, d.in.Config.GetAnnotations(), d.in.Handler.ContainerAnnotations)
	out[annotationType] = typeContainer
	out[annotationContainerName] = d.in.Config.GetMetadata().GetName()
	out[annotationImageName] = d.in.Image.Name
	if d.spec.Annotations == nil {
		d.spec.Annotations = make(map[string]string, len(out))
	}
	maps.Copy(d.spec.Annotations, out)
	return nil
}

// podAnnotations are the annotations of everything that runs for a pod.
func podAnnotations(id string, config *criv1.PodSandboxConfig, handler pod.Handler) map[string]string {
	out := make(map[string]string)
	maps.Copy(out, handler.DefaultAnnotations) // those that the pod may set win
	pass(out, config.GetAnnotations(), handler.PodAnnotations)
	meta := config.GetMetadata()
	out[pod.AnnotationSandboxID] = id
	out[annotationSandboxName] = meta.GetName()
	out[annotationSandboxNS] = meta.GetNamespace()
	out[annotationSandboxUID] = meta.GetUid()
	return out
}

// pass copies the annotations whose names match one of the patterns.
func pass(dst, src map[string]string, patterns []string) {
	for name, value := range src {
		for _, p := range patterns {
			if ok, err := path.Match(p, name); err == nil && ok {
				dst[name] = value
			}
		}
	}
}
