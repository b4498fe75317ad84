#!/usr/bin/env bash
# Builds the images crisp/<service>:TAG from the static programs in .bin. Nothing is pulled: every
# image starts from scratch and is one tar file. Usage: build.sh TAG
set -euo pipefail

tag=${1:?usage: build.sh TAG}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bin=$root/.bin
here=$root/deploy/docker

# The user of the processes in the images, but sandboxd.
crisp=65532

# begin SERVICE makes an empty context with the service's Dockerfile and program.
begin() {
	context=$bin/image/$1
	rm -rf "$context"
	install -d "$context" "$context/rootfs"
	cp "$here/$1.Dockerfile" "$context/Dockerfile"
	add /usr/bin "$bin/$1"
	add /etc "$here/passwd" "$here/group"
	# The volume of the sockets takes owner and mode from here: each process makes its own
	# socket, and the sticky bit keeps it from removing those of others.
	folder 1775 0 $crisp /run/crisp
}

# add FOLDER FILE... puts files of root's into a folder of the image.
add() {
	local to=$context/rootfs$1
	shift
	install -d "$to"
	cp -R "$@" "$to/"
	(cd "$context/rootfs" && pack --owner=0 --group=0 .)
	rm -rf "$context/rootfs"/*
}

# folder MODE UID GID PATH makes an empty folder of the image.
folder() {
	install -d -m "$1" "$context/rootfs$4"
	(cd "$context/rootfs" && pack --owner="$2" --group="$3" --no-recursion "./${4#/}")
	rm -rf "$context/rootfs"/*
}

pack() { tar --numeric-owner --mtime=@0 --sort=name -rf "$context/rootfs.tar" "$@"; }

build() {
	rm -rf "$context/rootfs"
	docker build --quiet --tag "crisp/$1:$tag" "$context"
}

begin eventbus
folder 0700 $crisp $crisp /var/lib/crisp/eventbus
build eventbus

begin sandboxd
add /usr/bin "$bin"/{crisp-init,containerd-shim-crisp-v1,containerd-shim-runc-v2,runc}
add /opt/cni/bin "$bin"/cni/*
add /etc/cni/net.d "$root/deploy/cni/10-crisp.conflist"
add /etc/crisp "$here/sandboxd.toml"
add /etc/ssl/certs /etc/ssl/certs/ca-certificates.crt
folder 1777 0 0 /tmp
folder 0755 0 0 /var/run
build sandboxd

begin nri-hub
folder 0755 $crisp $crisp /var/run/nri
build nri-hub

begin cri-gateway
add /etc/crisp "$here/cri-gateway.toml"
build cri-gateway
