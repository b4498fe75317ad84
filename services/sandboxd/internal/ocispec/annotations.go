package ocispec

import (
	"cmp"
	"maps"
	"path"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Annotations by which shims, OCI runtimes and tools tell containers apart.
const (
	annotationContainerName = "io.kubernetes.cri.container-name"
	annotationImageName     = "io.kubernetes.cri.image-name"
)

func (d *draft) annotations() error {
	out := podAnnotations(d.in.SandboxID, d.in.SandboxConfig, d.in.Handler)
	pass(out, d.in.Config.GetAnnotations(), d.in.Handler.ContainerAnnotations)
	out[pod.AnnotationType] = pod.TypeContainer
	out[annotationContainerName] = d.in.Config.GetMetadata().GetName()
	// As its user wrote it, which may differ from the name that it was found by.
	out[annotationImageName] = cmp.Or(d.in.Config.GetImage().GetUserSpecifiedImage(), d.in.Image.Name)
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
	maps.Copy(out, pod.Annotations(id, config.GetMetadata()))
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
