// Package validate checks the form of CRI requests before anything is done for them.
//
// Every function is pure. It returns nil, or an error that wraps
// errdefs.ErrInvalidArgument and begins with the path of the first field at fault, as
// written in the CRI protocol ("config.metadata.name: must not be empty"). Absent
// sub-messages that have a meaning (no linux section, no filter) pass; those that a
// call cannot do without do not. Whether an object exists, and whether its state allows
// the call, is not this package's business.
package validate

import (
	"fmt"
	"strings"
	"unicode"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	maxName = 255  // longest file name; names become part of file names
	maxPath = 4095 // longest path
	maxID   = 128
	// maxRanges is how many ranges of ids the kernel takes for one file system.
	maxRanges = 340
	// maxText bounds what an object is described by in every list: kubelet takes no list above
	// 16 MiB, and one object must not make that of all unreadable. Kubernetes itself allows a
	// pod 256 KiB.
	maxText = 2 << 20
)

// invalid names the field and says what is wrong with it.
func invalid(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
}

// firstError returns the first error of its arguments.
func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// ID checks an object's id or a prefix of one. Whether the object exists is another
// question: stopping what is not there is no error, a malformed id is.
func ID(field, id string) error {
	if id == "" {
		return invalid(field, "must not be empty")
	}
	if len(id) > maxID {
		return invalid(field, "must not be longer than %d characters", maxID)
	}
	for _, r := range id {
		if !isIDRune(r) {
			return invalid(field, "must not contain %q", r)
		}
	}
	return nil
}

func isIDRune(r rune) bool {
	switch {
	case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
		return true
	}
	return r == '-' || r == '_' || r == '.'
}

// name checks a string that becomes part of keys, host names and file names.
func name(field, value string) error {
	if value == "" {
		return invalid(field, "must not be empty")
	}
	return optionalName(field, value)
}

func optionalName(field, value string) error {
	if len(value) > maxName {
		return invalid(field, "must not be longer than %d bytes", maxName)
	}
	if value == "." || value == ".." || strings.ContainsAny(value, `/\`) {
		return invalid(field, "must not be or contain a path element")
	}
	return printable(field, value)
}

// printable refuses control characters, which would end lines of generated files.
func printable(field, value string) error {
	if i := strings.IndexFunc(value, unicode.IsControl); i >= 0 {
		return invalid(field, "must not contain control character %q", value[i])
	}
	return nil
}

// description checks the size of what an object is listed with: its labels and annotations, and
// the specification of a container's image.
func description(field string, image *criv1.ImageSpec, texts ...map[string]string) error {
	size := proto.Size(image)
	for _, text := range texts {
		for key, value := range text {
			size += len(key) + len(value)
		}
	}
	if size > maxText {
		return invalid(field, "labels, annotations and image must not be longer than %d bytes, are %d", maxText, size)
	}
	return nil
}

// timeout checks a number of seconds.
func timeout(field string, seconds int64) error {
	if seconds < 0 {
		return invalid(field, "must not be negative, is %d", seconds)
	}
	return nil
}

// Message refuses what no field of any request may hold: strings with a NUL byte and
// enum values that are not in the protocol.
func Message(m proto.Message) error {
	if m == nil {
		return nil
	}
	return message("", m.ProtoReflect())
}

func message(path string, m protoreflect.Message) error {
	var err error
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		err = field(join(path, string(fd.Name())), fd, v)
		return err == nil
	})
	return err
}

func field(path string, fd protoreflect.FieldDescriptor, v protoreflect.Value) error {
	var err error
	switch {
	case fd.IsMap():
		v.Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
			err = firstError(value(path, fd.MapKey(), k.Value()),
				value(fmt.Sprintf("%s[%q]", path, k.String()), fd.MapValue(), v))
			return err == nil
		})
	case fd.IsList():
		for i := range v.List().Len() {
			if err = value(fmt.Sprintf("%s[%d]", path, i), fd, v.List().Get(i)); err != nil {
				return err
			}
		}
	default:
		err = value(path, fd, v)
	}
	return err
}

func value(path string, fd protoreflect.FieldDescriptor, v protoreflect.Value) error {
	switch fd.Kind() {
	case protoreflect.StringKind:
		if strings.ContainsRune(v.String(), 0) {
			return invalid(path, "must not contain a NUL byte")
		}
	case protoreflect.EnumKind:
		if fd.Enum().Values().ByNumber(v.Enum()) == nil {
			return invalid(path, "unknown value %d", v.Enum())
		}
	case protoreflect.MessageKind:
		return message(path, v.Message())
	}
	return nil
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// absent refuses a section that is for nodes of another system. One that says nothing is no
// request.
func absent(field string, m proto.Message) error {
	if m.ProtoReflect().IsValid() && proto.Size(m) > 0 {
		return invalid(field, "must not be set, the node runs Linux")
	}
	return nil
}

// Image checks an image specification that may name the image by name, tag, digest or id.
func Image(field string, spec *criv1.ImageSpec) error {
	if spec == nil {
		return invalid(field, "must be set")
	}
	if spec.GetImage() == "" {
		return invalid(field+".image", "must not be empty")
	}
	if _, err := reference.ParseAnyReference(spec.GetImage()); err != nil {
		return invalid(field+".image", "%q is not an image name, digest or id: %v", spec.GetImage(), err)
	}
	return message(field, spec.ProtoReflect())
}

// PullImage checks a request to pull an image; an id cannot be pulled.
func PullImage(req *criv1.PullImageRequest) error {
	if err := Image("image", req.GetImage()); err != nil {
		return err
	}
	if _, err := reference.ParseDockerRef(req.GetImage().GetImage()); err != nil {
		return invalid("image.image", "%q is not an image name: %v", req.GetImage().GetImage(), err)
	}
	return Message(req)
}

// Filter checks what selects objects of a list; an absent one selects everything.
func Filter(filter proto.Message) error {
	if filter == nil || !filter.ProtoReflect().IsValid() {
		return nil
	}
	return message("filter", filter.ProtoReflect())
}
