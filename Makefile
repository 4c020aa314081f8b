# bivy: make help lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

export CGO_ENABLED := 0
GO      ?= go
GVISOR  := $(shell $(GO) list -m -f '{{.Version}}' gvisor.dev/gvisor 2>/dev/null)
# What decides whether a snapshot can be restored: gVisor, Go and the sentry's own sources.
BUILD   := bivy-$(shell { echo "$(GVISOR)"; $(GO) env GOVERSION; cat internal/driver/gvisor/sentry/*.go internal/driver/gvisor/bootflags/*.go cmd/bivy-sentry/*.go; } | sha256sum | cut -c1-16)
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
STRIP   := -s -w
GV      := -X gvisor.dev/gvisor/runsc/version.version=$(BUILD)

# Debian packages whose files make the base template, and that the tests use.
PACKAGES := $(shell sed -n 's/^	"\(.*\)",.*/\1/p' internal/template/debian/base_packages.go 2>/dev/null)

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

.PHONY: build
build: ## build bin/bivy with everything it carries inside
	@mkdir -p bin
	$(GO) build -trimpath -ldflags "$(STRIP) $(GV)" -o bin/bivy-sentry ./cmd/bivy-sentry
	GO="$(GO)" cmd/bivy-guest/build.sh bin/bivy-guest
	$(GO) run ./internal/bundle/pack -build $(BUILD) bin/bivy-sentry bin/bivy-guest
	$(GO) build -trimpath -ldflags "$(STRIP) $(GV) -X main.version=$(VERSION)" -o bin/bivy ./cmd/bivy
