#!/usr/bin/env bash
# Installs from the distribution (Debian 12) what building and running Crisp need.
# Does nothing, and needs neither root nor a network, when all of it is there. With --test also what
# the end-to-end tests need, with --docker what the test of docker-compose.yaml needs, with --vm what the
# test in a virtual machine needs.
set -euo pipefail

# A program or file that shows that a package is there, and the package.
needs=(
	"cmd:gcc gcc"
	"file:/usr/include/stdlib.h libc6-dev"
	"cmd:pkg-config pkg-config"
	"file:/usr/include/seccomp.h libseccomp-dev"
	"cmd:iptables iptables"
	"cmd:nft nftables"
	"cmd:ip iproute2"
	"cmd:conntrack conntrack"
	"cmd:pgrep procps"
	"cmd:busybox busybox"
	"file:/etc/ssl/certs/ca-certificates.crt ca-certificates"
)

case ${1:-} in
--test) needs+=("cmd:strace strace" "cmd:mkfs.erofs erofs-utils") ;;
--docker) needs+=("cmd:dockerd docker.io" "cmd:docker-compose docker-compose") ;;
--vm) needs+=("cmd:debootstrap debootstrap" "cmd:qemu-system-x86_64 qemu-system-x86" "cmd:mke2fs e2fsprogs") ;;
esac

export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

missing=()
for need in "${needs[@]}"; do
	read -r sign package <<<"$need"
	case $sign in
	cmd:*) command -v "${sign#cmd:}" >/dev/null || missing+=("$package") ;;
	file:*) [[ -e ${sign#file:} ]] || missing+=("$package") ;;
	esac
done

if ((${#missing[@]} == 0)); then
	exit 0
fi
if ! command -v apt-get >/dev/null; then
	echo "missing on this machine: ${missing[*]} (Debian's names); install them and try again" >&2
	exit 1
fi
if [[ $(id -u) != 0 ]]; then
	echo "missing on this machine; as root: apt-get install --no-install-recommends ${missing[*]}" >&2
	exit 1
fi

echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install --yes --quiet --no-install-recommends "${missing[@]}")
# The package lists may be missing or older than the mirror.
if ! "${install[@]}" </dev/null >/dev/null 2>&1; then
	apt-get update --quiet </dev/null
	"${install[@]}" </dev/null
fi
