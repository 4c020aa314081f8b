# bivy: make help lists the targets. Everything runs as root on Debian with Go.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

export CGO_ENABLED := 0
GO      ?= go
GVISOR   = $(shell $(GO) list -m -f '{{.Version}}' gvisor.dev/gvisor)
# A hash of gVisor's version, Go's version and the sentry's sources: snapshots can only be restored by the build that saved them.
BUILD    = bivy-$(shell { echo "$(GVISOR)"; $(GO) env GOVERSION; cat internal/driver/gvisor/sentry/*.go internal/driver/gvisor/bootflags/*.go cmd/bivy-sentry/*.go; } | sha256sum | cut -c1-16)
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT  ?= $(shell git rev-parse HEAD 2>/dev/null)
STRIP   := -s -w
GV       = -X gvisor.dev/gvisor/runsc/version.version=$(BUILD)

# Packages whose tests need root, real gVisor or the built binaries. They run without the race detector.
GVISOR_PACKAGES := ./internal/driver/gvisor/... ./internal/e2e/... ./internal/bench/... ./cmd/...

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 14

.PHONY: deps
deps: ## install the Debian packages that the base template and the tests need
	@missing=$$($(GO) run ./internal/doctor/missing); \
	command -v gcc >/dev/null || missing="$$missing gcc libc6-dev"; \
	if [ -n "$$missing" ]; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; fi

.PHONY: build
build: ## build bin/bivy with the binaries embedded in it
	@mkdir -p bin
	$(GO) build -trimpath -ldflags "$(STRIP) $(GV)" -o bin/bivy-sentry ./cmd/bivy-sentry
	cmd/bivy-guest/build.sh bin/bivy-guest
	$(GO) run ./internal/bundle/pack -build $(BUILD) bin/bivy-sentry bin/bivy-guest
	$(GO) build -trimpath -ldflags "$(STRIP) $(GV) -X main.version=$(VERSION) -X main.commit=$(COMMIT)" -o bin/bivy ./cmd/bivy

.PHONY: run
run: deps build ## run a Python program in a real sandbox and verify its record
	@echo "--- examples/primes.py in a sandbox:"
	@bin/bivy run --timing --upload examples/primes.py:/home/user/primes.py -- python3 /home/user/primes.py
	@echo "--- the record of the session:"
	@id=$$(bin/bivy ls --all --quiet | sed -n 1p); bin/bivy logs $$id; \
	bin/bivy audit export $$id >bin/record.jsonl; bin/bivy audit verify bin/record.jsonl

.PHONY: test
test: deps build vet race root docs ## run all tests, as root

.PHONY: vet
vet: ## run go vet and the tests of the architecture
	$(GO) vet ./...
	$(GO) test -count=1 .

.PHONY: race
race: ## run the tests that need no gVisor, with the race detector
	CGO_ENABLED=1 $(GO) test -race -shuffle=on -timeout 10m $$($(GO) list ./... | grep -v -e /internal/driver/gvisor -e /internal/e2e -e '^bivy$$' -e /internal/bench -e /cmd/)

.PHONY: root
root: build ## run the tests with real gVisor
	$(GO) test -count=1 -p 1 -timeout 20m $(GVISOR_PACKAGES)

.PHONY: docs
docs: build ## run every command in the documents
	BIVY_BIN=$(CURDIR)/bin/bivy $(GO) test -count=1 -timeout 10m -run Docs .

.PHONY: bench
bench: deps build ## run the benchmarks; SUITE=cold runs one suite
	bin/bivy --config /dev/null bench $(SUITE)

.PHONY: lint
lint: ## run the linters (the first run takes minutes)
	$(GO) run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0 run

.PHONY: fuzz
fuzz: ## fuzz every target for FUZZTIME (default 30s) each
	@for p in $$(grep -rl --include='*_test.go' '^func Fuzz' . | xargs -n1 dirname | sort -u); do \
	for f in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9]*\).*/\1/p' $$p/*_test.go); do \
	echo "$$p $$f"; $(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime $${FUZZTIME:-30s} $$p; done; done

.PHONY: generate
generate: ## regenerate code (takes minutes; needs protobuf-compiler)
	$(GO) generate ./...

.PHONY: clean
clean: ## remove build results
	rm -rf bin bench/out internal/bundle/payload/*.zst internal/bundle/payload/manifest.json
