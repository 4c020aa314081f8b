#!/bin/sh
# Builds bivy-guest as it is shipped: static, without HTTP/2, and with
# internal/guest/notls in place of crypto/tls. Usage: build.sh OUTPUT [FLAGS]
set -eu
out=$1
shift
case $out in /*) ;; *) out=$PWD/$out ;; esac
cd "$(dirname "$0")/../.."
overlay=$(mktemp)
trap 'rm -f "$overlay"' EXIT
tls=$("${GO:-go}" env GOROOT)/src/crypto/tls
{
	printf '{"Replace":{'
	for file in "$tls"/*.go; do
		[ "$file" = "$tls/tls.go" ] || printf '"%s":"",' "$file"
	done
	printf '"%s":"%s"}}' "$tls/tls.go" "$PWD/internal/guest/notls/tls.go"
} >"$overlay"
export CGO_ENABLED=0
"${GO:-go}" build -overlay "$overlay" -tags nethttpomithttp2 -trimpath -ldflags='-s -w' -o "$out" "$@" ./cmd/bivy-guest
