# Crisp: everything a developer, the CI and a curious reader run. `make` lists the targets.
#
# Programs are built into .bin/. Those of other projects are rebuilt only when their pin changes.

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

include .tools/versions.mk

ROOT   := $(CURDIR)
BIN    := $(ROOT)/.bin
PINS   := $(BIN)/.pins
export PATH := $(BIN):$(PATH)
# Where tests of single packages find what they start.
export CRISP_TEST_RUNC := $(BIN)/runc
export CRISP_TEST_CNI_BIN := $(BIN)/cni
export CRISP_TEST_CONTAINERD := $(BIN)/containerd

SERVICES := cri-gateway sandboxd nri-hub eventbus
HELPERS  := crisp-init
PROGRAMS := fixture-guest fixture-registry conformance
MODULES  := proto services/internal $(SERVICES:%=services/%) tests

# Without a usable git checkout a build carries no revision, instead of failing.
VCS := $(shell git rev-parse --verify --quiet HEAD >/dev/null 2>&1 || echo -buildvcs=false)

# Builds, tests without the race detector and the linter use the same flags, so that what one of
# them compiled serves the others.
SAME_FLAGS   := CGO_ENABLED=0 GOFLAGS=-trimpath
GO_BUILD     := CGO_ENABLED=0 go build -trimpath $(VCS) -ldflags '-s -w'
GO_TEST      := $(SAME_FLAGS) go test
GO_TEST_RACE := go test -race
# A busy machine has a part in what tests find: up to three that fail are run once more, each outcome
# is printed, and one that fails twice fails the run, as more of them, a data race and a panic do at
# once. The linter has vetted the code.
GOTESTSUM    := gotestsum --format pkgname-and-test-fails --format-hide-empty-pkg --rerun-fails=1 --rerun-fails-max-failures=3
TEST_FLAGS   ?=
# Of one package, and how many packages run side by side: they wait more than they work.
E2E_TIMEOUT  ?= 40m
E2E_PARALLEL ?= 1
comma        := ,
# Specs that the test in the virtual machine runs; empty: all.
FOCUS        ?=
# Runtime handlers of the conformance tests, the default one first.
HANDLER      ?= crisp,runc
FUZZTIME     ?= 20s
BENCHTIME    ?= 1s
IMAGE_TAG    ?= dev
COMPOSE       = CRISP_TAG=$(IMAGE_TAG) $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose) --project-name crisp

# Packages that have tests behind the build tag `integration`; they need root.
integration_packages = $(sort $(dir $(shell grep -rl --include='*_test.go' '^//go:build integration' $(1) 2>/dev/null)))
# Those that take longest begin first.
e2e_packages = $(addprefix ./,$(LONG_TESTS) $(filter-out $(LONG_TESTS),$(call integration_packages,services tests)))
LONG_TESTS := tests/faults/ tests/e2e/ tests/chaos/ services/sandboxd/internal/controller/

##@ Help

.PHONY: help
help: ## Print this list
	@awk 'BEGIN {FS = ":.*## "} \
		/^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-zA-Z0-9_-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Run it

.PHONY: run
run: ## Run the four processes and a sample pod in the foreground; ONCE=1 ends by itself
	@deploy/run/run.sh $(if $(filter-out 0 no false,$(ONCE)),--once)

.PHONY: up
up: image ## Start the processes as containers with docker-compose
	$(COMPOSE) up --detach
	@echo "CRI socket: $$(docker volume inspect --format '{{.Mountpoint}}' crisp_run)/cri.sock"

.PHONY: down
down: ## Remove all pods, stop the containers of `make up` and drop their volumes
	@socket=$$(docker volume inspect --format '{{.Mountpoint}}' crisp_run 2>/dev/null || true)/cri.sock; \
	if [[ -S $$socket ]]; then crictl --runtime-endpoint "unix://$$socket" rmp --all --force; fi
	$(COMPOSE) down --volumes --remove-orphans

##@ Build

.PHONY: system
system: ## Install from the distribution what building and running need (nothing if all is there)
	@deploy/run/install.sh

BUILT := $(addprefix $(BIN)/,$(SERVICES) $(HELPERS) $(PROGRAMS) containerd-shim-crisp-v1)

.PHONY: build
build: $(BUILT) ## Build the four services and the programs of the tests

# The Go build cache knows best what is up to date, so these always run.
.PHONY: $(BUILT)
$(SERVICES:%=$(BIN)/%): $(BIN)/%:
	$(GO_BUILD) -o $@ ./services/$*/cmd/$*
# Without gRPC, which a shim does not speak, it is a third smaller. With cgo it starts in half of
# the time, see crispshim/early.
$(BIN)/containerd-shim-crisp-v1: | system
	CGO_ENABLED=1 go build -trimpath $(VCS) -tags 'no_grpc netgo osusergo' -ldflags '-s -w -extldflags -static' \
		-o $@ ./services/sandboxd/cmd/containerd-shim-crisp-v1
$(HELPERS:%=$(BIN)/%): $(BIN)/%:
	$(GO_BUILD) -o $@ ./services/sandboxd/cmd/$*
$(PROGRAMS:%=$(BIN)/%): $(BIN)/%:
	$(GO_BUILD) -o $@ ./tests/cmd/$*

CNI_PROGRAMS := $(addprefix $(BIN)/cni/,$(notdir $(CNI_PLUGINS)))

.PHONY: parts
parts: $(BIN)/runc $(BIN)/containerd-shim-runc-v2 $(BIN)/crictl $(CNI_PROGRAMS) ## Build runc, the shim, crictl and the CNI plugins at their pins

# A pin is an empty file whose name holds the version: a new version makes a newer file.
$(PINS)/%:
	@mkdir -p $(PINS)
	@rm -f $(PINS)/$(firstword $(subst @, ,$*))@*
	@touch $@

MODULE_INSTALL = GOWORK=off go install -trimpath

$(BIN)/runc: $(PINS)/runc@$(RUNC_VERSION) | system
	CGO_ENABLED=1 GOBIN=$(BIN) $(MODULE_INSTALL) -tags 'seccomp netgo osusergo' -ldflags '-s -w -extldflags -static' \
		github.com/opencontainers/runc@$(RUNC_VERSION)
	@touch $@

$(BIN)/containerd-shim-runc-v2: $(PINS)/shim@$(SHIM_VERSION)
	CGO_ENABLED=0 GOBIN=$(BIN) $(MODULE_INSTALL) -ldflags '-s -w -X github.com/containerd/containerd/v2/version.Version=$(SHIM_VERSION)' \
		github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2@$(SHIM_VERSION)
	@touch $@

$(BIN)/crictl: $(PINS)/crictl@$(CRICTL_VERSION)
	CGO_ENABLED=0 GOBIN=$(BIN) $(MODULE_INSTALL) -ldflags '-s -w -X sigs.k8s.io/cri-tools/pkg/version.Version=$(CRICTL_VERSION)' \
		sigs.k8s.io/cri-tools/cmd/crictl@$(CRICTL_VERSION)
	@touch $@

$(CNI_PROGRAMS) &: $(PINS)/cni@$(CNI_VERSION)
	@mkdir -p $(BIN)/cni
	CGO_ENABLED=0 GOBIN=$(BIN)/cni $(MODULE_INSTALL) \
		-ldflags '-s -w -X github.com/containernetworking/plugins/pkg/utils/buildversion.BuildVersion=$(CNI_VERSION)' \
		$(CNI_PLUGINS:%=github.com/containernetworking/plugins/plugins/%@$(CNI_VERSION))
	@touch $(CNI_PROGRAMS)

# containerd itself, to run our shim under it.
$(BIN)/containerd/containerd $(BIN)/containerd/ctr &: $(PINS)/containerd@$(SHIM_VERSION)
	@mkdir -p $(BIN)/containerd
	CGO_ENABLED=0 GOBIN=$(BIN)/containerd $(MODULE_INSTALL) -ldflags '-s -w -X github.com/containerd/containerd/v2/version.Version=$(SHIM_VERSION)' \
		github.com/containerd/containerd/v2/cmd/containerd@$(SHIM_VERSION) github.com/containerd/containerd/v2/cmd/ctr@$(SHIM_VERSION)
	@touch $(BIN)/containerd/containerd $(BIN)/containerd/ctr

$(BIN)/critest: tests/critest/go.mod tests/critest/go.sum
	cd tests/critest && GOWORK=off CGO_ENABLED=0 go test -c -trimpath -o $@ sigs.k8s.io/cri-tools/cmd/critest
	@touch $@

# Kubernetes takes its parts from its own tree, which its module has not: .tools/kubelet/go.mod names their
# releases instead. It is much to compile, which is done beside other work.
$(BIN)/kubelet: .tools/kubelet/go.mod .tools/kubelet/go.sum
	cd .tools/kubelet && version=$$(GOWORK=off go list -m -f '{{.Version}}' k8s.io/kubernetes) && \
	GOWORK=off CGO_ENABLED=0 nice -n 19 go build -p 1 -trimpath -o $@ -ldflags "-s -w \
		-X k8s.io/component-base/version.gitVersion=$$version -X k8s.io/client-go/pkg/version.gitVersion=$$version" \
		k8s.io/kubernetes/cmd/kubelet
	@touch $@

.PHONY: tools
tools: $(BIN)/buf $(BIN)/golangci-lint $(BIN)/gotestsum ## Build the developer's tools at the versions of .tools/go.mod

TOOL_buf           := github.com/bufbuild/buf/cmd/buf
TOOL_golangci-lint := github.com/golangci/golangci-lint/v2/cmd/golangci-lint
TOOL_gotestsum     := gotest.tools/gotestsum

$(BIN)/buf $(BIN)/golangci-lint $(BIN)/gotestsum: $(BIN)/%: .tools/go.mod .tools/go.sum
	CGO_ENABLED=0 GOWORK=off GOBIN=$(BIN) go -C .tools install -trimpath $(TOOL_$*)
	@touch $@

.PHONY: image
image: build parts ## Build the container images of the four services
	@deploy/docker/build.sh $(IMAGE_TAG)

.PHONY: clean
clean: ## Remove everything that was built
	rm -rf $(BIN)

##@ Test

.PHONY: test
test: test-unit test-run test-e2e ## Run all tests: unit tests, `make run`, then end-to-end tests (root)

.PHONY: test-unit
test-unit: system build $(BIN)/gotestsum ## Run the unit tests of all modules under the race detector
	$(GOTESTSUM) --rerun-fails-abort-on-data-race --packages work -- -race -vet=off -timeout 10m $(TEST_FLAGS)

.PHONY: test-race
test-race: system ## Run the unit tests three times over under the race detector
	$(GO_TEST_RACE) -count=3 -timeout 20m $(TEST_FLAGS) work

.PHONY: test-e2e
test-e2e: system build parts $(BIN)/containerd/ctr $(BIN)/gotestsum ## Run the tests that start real processes, runc and CNI plugins (root)
	@[[ $$(id -u) == 0 ]] || { echo "end-to-end tests start containers: run this as root" >&2; exit 1; }
	@deploy/run/install.sh --test
	$(SAME_FLAGS) CRISP_TEST_ALL=1 $(GOTESTSUM) --packages '$(e2e_packages)' -- \
		-tags integration -vet=off -count=1 -p $(E2E_PARALLEL) -timeout $(E2E_TIMEOUT) $(TEST_FLAGS)

.PHONY: test-run
test-run: system build parts ## Run `make run` in namespaces of its own, end it in three ways, look for what is left (root)
	@deploy/run/test.sh

.PHONY: test-compose
test-compose: system build parts ## Start the docker-compose stack on a private Docker engine, run a pod, take it down (root)
	@deploy/docker/test.sh $(IMAGE_TAG)

.PHONY: test-kubelet
test-kubelet: system build parts $(BIN)/kubelet ## Run a real kubelet with static pods on the four processes; TEST_FLAGS='-run TestX' (root)
	@[[ $$(id -u) == 0 ]] || { echo "kubelet starts containers: run this as root" >&2; exit 1; }
	@deploy/run/install.sh --test
	$(GO_TEST) -tags kubelet -vet=off -count=1 -timeout 60m -v $(TEST_FLAGS) ./tests/kubelet/

.PHONY: test-vm
test-vm: system build parts $(BIN)/critest ## Install Crisp in a Debian virtual machine with systemd, cgroup v2 and AppArmor, run critest there (root)
	@deploy/run/install.sh --vm
	@deploy/vm/test.sh $(firstword $(subst $(comma), ,$(HANDLER))) '$(FOCUS)'

.PHONY: conformance
conformance: system build parts $(BIN)/critest ## Run critest against the four processes with each shim, HANDLER=crisp or runc with one (root)
	$(BIN)/conformance $(if $(HANDLER),--handler $(HANDLER)) $(CONFORMANCE_FLAGS)

.PHONY: fuzz
fuzz: ## Run each fuzz target for FUZZTIME (default 20s)
	@grep -rHo --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*' proto services tests | sed 's/func //' | sort | \
	while IFS=: read -r file name; do \
		echo "== $$name in $$(dirname $$file)"; \
		go test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) ./$$(dirname $$file); \
	done

.PHONY: bench-shim
bench-shim: system build parts ## Compare memory, start and exec of our shim with the stock shim (root); the ratios come last
	@export CRISP_TEST_SHIM=$(BIN)/containerd-shim-runc-v2 CRISP_TEST_CRISP_SHIM=$(BIN)/containerd-shim-crisp-v1; \
	out=$$($(SAME_FLAGS) go -C services/sandboxd test -tags integration -run '^$$' -bench Shim -benchtime 1x ./internal/crispshim) || { echo "$$out"; exit 1; }; \
	grep -v '^pss_ratio=' <<<"$$out"; grep '^pss_ratio=' <<<"$$out"

# First the hub alone beside NRI's library, then what it comes to for a caller of CRI.
.PHONY: bench-nri
bench-nri: system build parts $(BIN)/containerd/ctr ## Compare what NRI plugins add to a CreateContainer with containerd (root); the ratios come last
	@out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT; \
	$(SAME_FLAGS) go test -tags bench -c -o "$$out/hub" ./services/nri-hub/internal/app/adaptationtest; \
	$(SAME_FLAGS) go test -tags bench -c -o "$$out/cri" ./tests/bench; \
	"$$out/hub" -test.run '^TestLatency$$'; \
	"$$out/cri" -test.timeout 30m -test.run '^(TestPlugins|TestSlowPlugin)$$'

.PHONY: bench-cri
bench-cri: system build parts $(BIN)/containerd/ctr ## Compare the steps of a pod with containerd (root); the ratio comes last
	@out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT; \
	$(SAME_FLAGS) go test -tags bench -c -o "$$out/bench" ./tests/bench; \
	"$$out/bench" -test.timeout 30m -test.run '^TestSteps$$'

.PHONY: bench
bench: ## Run the benchmarks of all modules
	go test -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) work

##@ Source

.PHONY: generate
generate: $(BIN)/buf ## Generate Go code from the .proto files
	cd proto && buf generate

.PHONY: fmt
fmt: $(BIN)/buf $(BIN)/golangci-lint ## Format Go code and .proto files
	golangci-lint fmt $(MODULES)
	cd proto && buf format --write --path crisp

.PHONY: lint
lint: verify-lint verify-proto ## Lint Go code, .proto files and scripts

.PHONY: tidy
tidy: ## Tidy each module and even out their dependencies
	@for m in $(MODULES); do echo "go -C $$m mod tidy"; go -C $$m mod tidy; done
	go work sync

.PHONY: fix
fix: tidy generate fmt ## Repair what verify-tidy, verify-generate and verify-lint (formatting) complain about

.PHONY: verify
verify: verify-generate verify-proto verify-tidy verify-lint verify-arch ## Check that generated code, modules, style and structure are in order

.PHONY: verify-generate
verify-generate: $(BIN)/buf ## Check that the generated code is what the .proto files give
	@out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT; \
	(cd proto && buf generate -o "$$out"); \
	diff -r "$$out/gen" proto/gen || { echo "proto/gen is stale: make generate" >&2; exit 1; }

.PHONY: verify-proto
verify-proto: $(BIN)/buf ## Lint the .proto files, their format and their compatibility with the main branch
	cd proto && buf lint
	cd proto && buf format --diff --exit-code --path crisp
	@if git cat-file -e origin/main:proto/buf.yaml 2>/dev/null; then \
		cd proto && buf breaking --against '../.git#ref=origin/main,subdir=proto'; \
	fi

.PHONY: verify-tidy
verify-tidy: ## Check that go.mod and go.sum of each module are tidy
	@for m in $(MODULES); do echo "go -C $$m mod tidy -diff"; go -C $$m mod tidy -diff; done

.PHONY: verify-lint
verify-lint: $(BIN)/golangci-lint ## Run golangci-lint over all modules, and check the scripts
	$(SAME_FLAGS) golangci-lint run $$(go list -m -f '{{.Dir}}/...')
	@scripts=$$(grep -rlE '^#!.*bash' .ci deploy); for s in $$scripts; do bash -n "$$s"; done; \
	if command -v shellcheck >/dev/null; then shellcheck -x $$scripts; fi

.PHONY: verify-arch
verify-arch: ## Run the architecture tests
	$(GO_TEST) -count=1 ./tests/arch/...
