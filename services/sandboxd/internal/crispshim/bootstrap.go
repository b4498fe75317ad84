package crispshim

import (
	"fmt"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protowire"
)

// The messages of the start are read and written by hand: the shim starts while the runtime
// waits, and building what general decoding needs would take longer than all else.

// Fields of containerd.runtime.bootstrap.v1.
const (
	paramInstanceID  protowire.Number = 1
	paramNamespace   protowire.Number = 2
	paramLogLevel    protowire.Number = 3
	paramGRPCAddress protowire.Number = 6
	paramExtensions  protowire.Number = 8
	paramSocketDir   protowire.Number = 9

	resultVersion  protowire.Number = 1
	resultAddress  protowire.Number = 2
	resultProtocol protowire.Number = 3
)

const (
	// levelDebug and what is below it mean detailed logs.
	levelDebug = -4
	// optionsType is the type of the runtime options among the extensions.
	optionsType = "containerd.runc.v1.Options"
	// optionShimCgroup is the field of the options that names the shim's control group.
	optionShimCgroup protowire.Number = 3
	// protocolVersion is the version of the task service.
	protocolVersion = 3
)

// bootParams are the parameters of a start that matter here.
type bootParams struct {
	id, namespace, address, socketDir string
	debug                             bool
	// options are the encoded runtime options; nil if there are none.
	options []byte
}

// eachField calls use for each field of an encoded message, with its bytes or its number.
func eachField(data []byte, use func(n protowire.Number, bytes []byte, number uint64) error) error {
	for len(data) > 0 {
		n, kind, size := protowire.ConsumeTag(data)
		if size < 0 {
			return protowire.ParseError(size)
		}
		data = data[size:]
		var value []byte
		var number uint64
		switch kind {
		case protowire.BytesType:
			value, size = protowire.ConsumeBytes(data)
		case protowire.VarintType:
			number, size = protowire.ConsumeVarint(data)
		default:
			size = protowire.ConsumeFieldValue(n, kind, data)
		}
		if size < 0 {
			return protowire.ParseError(size)
		}
		if err := use(n, value, number); err != nil {
			return err
		}
		data = data[size:]
	}
	return nil
}

// parseParams decodes BootstrapParams.
func parseParams(data []byte) (bootParams, error) {
	var p bootParams
	err := eachField(data, func(n protowire.Number, value []byte, number uint64) error {
		switch n {
		case paramInstanceID:
			p.id = string(value)
		case paramNamespace:
			p.namespace = string(value)
		case paramLogLevel:
			p.debug = int32(number) <= levelDebug
		case paramGRPCAddress:
			p.address = string(value)
		case paramSocketDir:
			p.socketDir = string(value)
		case paramExtensions:
			return p.addExtension(value)
		}
		return nil
	})
	if err != nil {
		return p, fmt.Errorf("bootstrap parameters: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return p, nil
}

// addExtension keeps the runtime options.
func (p *bootParams) addExtension(extension []byte) error {
	return eachField(extension, func(_ protowire.Number, packed []byte, _ uint64) error {
		var kind string
		var value []byte
		err := eachField(packed, func(n protowire.Number, bytes []byte, _ uint64) error {
			switch n {
			case 1:
				kind = string(bytes)
			case 2:
				value = bytes
			}
			return nil
		})
		if err == nil && kind == optionsType {
			p.options = append([]byte{}, value...)
		}
		return err
	})
}

// shimCgroup is the control group that the options name for the shim.
func (p *bootParams) shimCgroup() (string, error) {
	path := ""
	err := eachField(p.options, func(n protowire.Number, value []byte, _ uint64) error {
		if n == optionShimCgroup {
			path = string(value)
		}
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("runtime options: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return path, nil
}

// bootResult encodes the BootstrapResult of a shim that listens at a path.
func bootResult(path string) []byte {
	b := protowire.AppendTag(nil, resultVersion, protowire.VarintType)
	b = protowire.AppendVarint(b, protocolVersion)
	b = protowire.AppendTag(b, resultAddress, protowire.BytesType)
	b = protowire.AppendString(b, "unix://"+path)
	b = protowire.AppendTag(b, resultProtocol, protowire.BytesType)
	return protowire.AppendString(b, "ttrpc")
}
