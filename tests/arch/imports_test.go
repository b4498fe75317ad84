package arch

import (
	"slices"
	"strings"
	"testing"
)

// layer is a package's place in its service. Imports point only downwards:
// command, wiring, then handlers and adapters side by side, then the domain.
type layer int

const (
	domain layer = iota + 1
	adapter
	handler
	settings
	wiring
	command
)

// layers gives the place of each internal package of a service; what lies below
// a package belongs to it.
func layers() map[string]map[string]layer {
	return map[string]map[string]layer{
		"cri-gateway": {
			"api": handler, "app": wiring, "config": settings,
			"backend": adapter, "eventfeed": adapter, "streaming": adapter,
			"containerevents": domain, "operation": domain, "relay": domain, "sequence": domain, "status": domain, "validate": domain,
		},
		"sandboxd": {
			"api": handler, "app": wiring, "cadvisor": handler, "config": settings, "inspect": wiring,
			"apparmor": adapter, "classes": adapter, "containerio": adapter, "controller": adapter, "image": adapter, "namespaces": adapter,
			"network": adapter, "ocispec": adapter, "outbox": adapter, "podfiles": adapter, "preflight": adapter,
			"reserve": adapter, "rootfs": adapter,
			"shim": adapter, "stats": adapter, "store": adapter,
			"checkpoint": domain, "crilog": domain, "criview": domain, "engine": domain, "layerusage": domain, "pod": domain, "podmetrics": domain, "userns": domain,
			"crispshim": wiring, // a program of its own, with its parts below it
		},
		"nri-hub": {
			"api": handler, "app": wiring, "config": settings,
			"audit": adapter, "launch": adapter, "memory": adapter, "plugin": adapter, "listen": adapter,
			"adjust": domain, "change": domain, "fit": domain, "podspec": domain, "rule": domain, "hub": domain, "sound": domain, "sync": domain,
		},
		"eventbus": {
			"api": handler, "app": wiring, "config": settings,
			"access": adapter, "broker": adapter, "streams": adapter, "tail": adapter,
		},
	}
}

// below says which layers a layer may use.
func below(l layer) []layer {
	switch l {
	case command:
		return []layer{wiring, settings}
	case wiring:
		return []layer{settings, handler, adapter, domain}
	case handler, adapter, domain:
		return []layer{domain}
	case settings:
		return nil
	default:
		return nil
	}
}

// sideways lists the parts that stand on one of their own layer, or above, each
// for a reason.
func sideways() map[string][]string {
	return map[string][]string{
		"sandboxd/engine":     {"store"},      // A use case is one transaction; an interface would only repeat it.
		"sandboxd/outbox":     {"store"},      // Drains what use cases wrote.
		"sandboxd/controller": {"shim"},       // The controllers are two ways to use shims.
		"sandboxd/network":    {"namespaces"}, // Enters what was pinned.
		"sandboxd/stats":      {"namespaces"}, // Reads the counters of a pinned namespace.
		"eventbus/broker":     {"access"},     // The server enforces the permissions.
		"sandboxd/image":      {"namespaces"}, // Extracts on a thread whose root is the layer.
		"sandboxd/rootfs":     {"image"},      // Root file systems are snapshots of unpacked images.
		"sandboxd/app":        {"crispshim"},  // The daemon speaks to its shim's streams.
	}
}

// place splits the path of a service's package: its service, the name of its
// part and the part's layer.
func place(rel string) (service, part string, l layer) {
	rest, ok := strings.CutPrefix(rel, "services/")
	if !ok {
		return "", "", 0
	}
	service, rest, _ = strings.Cut(rest, "/")
	if strings.HasPrefix(rest, "cmd/") {
		return service, rest, command
	}
	part, _, _ = strings.Cut(strings.TrimPrefix(rest, "internal/"), "/")
	return service, part, layers()[service][part]
}

func TestImportsOfServicesPointDownwards(t *testing.T) {
	for _, p := range packages(t) {
		service, part, mine := place(p.rel())
		if _, known := layers()[service]; !known || part == "" {
			continue
		}
		if mine == 0 {
			t.Errorf("%s: has no layer; give it one in the table", p.rel())
			continue
		}
		for _, imported := range p.Imports {
			rel, own := strings.CutPrefix(imported, project+"/")
			if !own {
				continue
			}
			theirService, theirPart, theirs := place(rel)
			switch {
			case strings.HasPrefix(rel, "proto/gen/"), strings.HasPrefix(rel, "services/internal/"):
			case theirService != service:
				t.Errorf("%s imports %s of another service", p.rel(), rel)
			case theirPart == part, slices.Contains(sideways()[service+"/"+part], theirPart):
			case !slices.Contains(below(mine), theirs):
				t.Errorf("%s imports %s, which is not below it", p.rel(), rel)
			}
		}
	}
}

// Adapters of sandboxd know the engine by its ports alone.
func TestAdaptersKnowOnlyThePortsOfTheEngine(t *testing.T) {
	const engine, port = project + "/services/sandboxd/internal/engine", project + "/services/sandboxd/internal/engine/port"
	for _, p := range packages(t) {
		if service, _, mine := place(p.rel()); service != "sandboxd" || mine != adapter {
			continue
		}
		for _, imported := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			if imported != port && (imported == engine || strings.HasPrefix(imported, engine+"/")) {
				t.Errorf("%s imports %s", p.rel(), imported)
			}
		}
	}
}

// The packages of sandboxd's engine, those of its specifications, and those of the hub stand on
// each other in one order.
func TestImportsInsideTheLargePartsPointDownwards(t *testing.T) {
	const internal = "services/sandboxd/internal/"
	for part, floors := range map[string]map[string]int{
		internal + "engine": {
			"port": 1, "event": 1, "work": 1,
			"table": 2,
			"view":  3, "task": 3, "exec": 3, "capture": 3, "prepared": 3,
			"container": 4, "sandbox": 5,
			"": 6,
		},
		internal + "ocispec": {
			"host": 1, "namespace": 1, "device": 1, "hook": 1, "workload": 1,
			"resource": 2, "process": 2, "security": 2,
			"mount": 3, "nrispec": 3,
			"": 4,
		},
		"services/nri-hub/internal/hub": {
			"plug": 1, "object": 2, "member": 3,
			"roster": 4, "vet": 4,
			"outward": 5, "call": 6,
			"dispatch": 7, "join": 7,
			"": 8,
		},
	} {
		checkFloors(t, part, floors)
	}
}

// checkFloors checks that each package of a part imports only what has a lower floor of it.
func checkFloors(t *testing.T, part string, floors map[string]int) {
	t.Helper()
	floor := func(rel string) (int, bool) {
		name, inside := strings.CutPrefix(rel, part)
		if !inside {
			return 0, false
		}
		n, known := floors[strings.TrimPrefix(name, "/")]
		if !known {
			t.Errorf("%s: has no floor; give it one in the table", rel)
		}
		return n, known
	}
	for _, p := range packages(t) {
		mine, ok := floor(p.rel())
		if !ok {
			continue
		}
		for _, imported := range p.Imports {
			rel, own := strings.CutPrefix(imported, project+"/")
			if theirs, inside := floor(rel); own && inside && theirs >= mine {
				t.Errorf("%s imports %s, which is not below it", p.rel(), rel)
			}
		}
	}
}

// kitImports lists, for each package of the shared kit, what it may import
// besides the standard library.
func kitImports() map[string][]string {
	const (
		errdefs = "github.com/containerd/errdefs"
		otel    = "go.opentelemetry.io/"
		prom    = "github.com/prometheus/client_golang/"
		systemd = "github.com/coreos/go-systemd/"
		kit     = project + "/services/internal/"
	)
	return map[string][]string{
		"buildinfo":   nil,
		"config":      {"github.com/pelletier/go-toml/", errdefs},
		"brief":       {"google.golang.org/grpc"},
		"cli":         {errdefs, kit + "config", kit + "buildinfo", kit + "reload"},
		"reload":      {systemd, prom, "github.com/pelletier/go-toml/", "golang.org/x/sys/", kit + "telemetry", kit + "lifecycle"},
		"podselector": nil,
		"lifecycle":   {systemd, "golang.org/x/sync/"},
		"telemetry":   {otel, prom, errdefs, "google.golang.org/grpc", kit + "buildinfo", kit + "lifecycle"},
		"admin":       {prom, kit + "telemetry", kit + "lifecycle", kit + "buildinfo"},
		"unixsock":    {"golang.org/x/sys/", systemd, errdefs},
		"spare":       nil,
		"pause":       nil,
		"lane":        {"google.golang.org/grpc", "google.golang.org/protobuf/", otel, errdefs, project + "/proto/gen/crisp/lane/", kit + "telemetry", kit + "spare"},
		"rpc": {
			"google.golang.org/grpc", "google.golang.org/genproto/googleapis/rpc/", "google.golang.org/protobuf/", "github.com/grpc-ecosystem/go-grpc-middleware/",
			otel, prom, errdefs, kit + "telemetry", kit + "unixsock", kit + "lifecycle", kit + "config",
			project + "/proto/gen/crisp/lane/", kit + "lane", kit + "brief",
		},
		"ttrpcx": {"google.golang.org/grpc/codes", "google.golang.org/grpc/status", "github.com/containerd/ttrpc", "github.com/containerd/otelttrpc", otel, errdefs, prom, kit + "telemetry", kit + "lifecycle", kit + "brief"},
		"events": {
			"github.com/nats-io/", otel, prom, errdefs, "google.golang.org/protobuf/", "github.com/containerd/containerd/api/", "github.com/containerd/typeurl/",
			project + "/proto/gen/crisp/event/", kit + "telemetry", kit + "lifecycle", kit + "config", kit + "pause",
		},
	}
}

func TestKitImportsOnlyWhatItsTableSays(t *testing.T) {
	for _, p := range packages(t) {
		name, ok := strings.CutPrefix(p.rel(), "services/internal/")
		if !ok || name == "testkit" {
			continue
		}
		allowed, known := kitImports()[name]
		if !known {
			t.Errorf("%s: the kit's table does not know it", p.rel())
			continue
		}
		for _, imported := range p.Imports {
			host, _, _ := strings.Cut(imported, "/")
			standard := !strings.Contains(host, ".")
			if !standard && !slices.ContainsFunc(allowed, func(prefix string) bool { return strings.HasPrefix(imported, prefix) }) {
				t.Errorf("%s imports %s, which its table does not list", p.rel(), imported)
			}
		}
	}
}

// The tests drive programs and sockets; they link nothing of the services.
func TestTestsLinkNothingOfTheServices(t *testing.T) {
	for _, p := range packages(t) {
		if p.module != project+"/tests" {
			continue
		}
		for _, imported := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			if strings.HasPrefix(imported, project+"/services/") {
				t.Errorf("%s imports %s", p.rel(), imported)
			}
		}
	}
}

// The test kit is for tests, and for packages that only tests use: no program links it.
func TestTestKitIsUsedByTestsOnly(t *testing.T) {
	for _, p := range packages(t) {
		if strings.HasSuffix(p.rel(), "test") {
			continue // named like httptest, for tests
		}
		if slices.Contains(p.Imports, project+"/services/internal/testkit") {
			t.Errorf("%s imports the test kit outside of its tests", p.rel())
		}
	}
}
