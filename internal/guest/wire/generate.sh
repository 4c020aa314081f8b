#!/bin/sh
# Regenerates gen/ from proto/. Needs protoc (Debian: protobuf-compiler); both
# Go plugins are built at the versions go.mod names.
set -eu
cd "$(dirname "$0")"
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
go -C "${BIVY_MODULE:-.}" build -o "$bin/" google.golang.org/protobuf/cmd/protoc-gen-go connectrpc.com/connect/cmd/protoc-gen-connect-go
PATH="$bin:$PATH" protoc -I proto \
	--go_out=gen --go_opt=module=bivy/internal/guest/wire/gen \
	--connect-go_out=gen --connect-go_opt=module=bivy/internal/guest/wire/gen \
	process.proto filesystem.proto
gofmt -w gen
