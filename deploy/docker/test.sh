#!/usr/bin/env bash
# Tests the docker-compose stack on a real Docker engine of its own: builds the images, starts the
# stack, runs a pod through it with crictl, restarts nri-hub alone, takes the stack down and looks
# for what is left. Needs root, dockerd and docker-compose. Usage: test.sh TAG
#
# The engine runs in a network, mount and process namespace of its own with its own data folder:
# it changes no packet filter rule of this machine and nothing of it outlives this script.
set -euo pipefail

tag=${1:?usage: test.sh TAG}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=${CRISP_COMPOSE_DIR:-/var/tmp/crisp-compose}
group=crisp-compose
# The engine must find the shim that it was built with, not the one of this repository.
PATH=${PATH//"$root/.bin:"/}

die() { printf 'test.sh: %s\n' "$*" >&2 && exit 1; }
step() { printf -- '--- %s\n' "$*"; }

compose() {
	if docker compose version >/dev/null 2>&1; then
		CRISP_TAG=$tag docker compose --project-name crisp --file "$root/docker-compose.yaml" "$@"
	else
		CRISP_TAG=$tag docker-compose --project-name crisp --file "$root/docker-compose.yaml" "$@"
	fi
}

# cgroups_left lists the cgroups of the pods that were run and of the engine.
cgroups_left() {
	local id
	while read -r id; do
		find /sys/fs/cgroup -type d -name "*$id*"
	done <"$work/ids"
	find /sys/fs/cgroup -type d -path "*/$group/?*"
}

outside() {
	[[ $(id -u) == 0 ]] || die "a Docker engine needs root"
	command -v dockerd >/dev/null || die "dockerd is missing: apt-get install docker.io docker-compose"
	if [[ -e $work ]]; then
		rm -rf --one-file-system "$work"
	fi
	mkdir -p "$work"
	local left status=0
	touch "$work/ids"
	unshare --net --mount --pid --fork --kill-child --mount-proc --propagation private \
		"${BASH_SOURCE[0]}" "$tag" inside || status=$?
	left=$(cgroups_left)
	# The parents stay when the last cgroup below has gone; after a failure there are some below.
	find /sys/fs/cgroup -depth -type d \( -path "*/$group/*" -o -name "$group" \) -exec rmdir {} + 2>/dev/null || true
	rm -rf --one-file-system "$work"
	((status == 0)) || exit "$status"
	[[ -z $left ]] || die "cgroups are left: $left"
	echo "compose: passed"
}

# A machine may have taken capabilities from root for good; a privileged container, which asks for
# all there are, then cannot start. The engine of this test asks for those that exist.
write_runtime() {
	local bounding
	bounding=$((16#$(awk '/^CapBnd/ {print $2}' /proc/self/status)))
	cat >"$work/runtime" <<-SCRIPT
		#!/usr/bin/env bash
		if (( ($bounding >> 24 & 1) == 0 )); then
			before=
			for arg in "\$@"; do
				case \$before in
				--bundle) spec=\$arg/config.json ;;
				--process) spec=\$arg ;;
				esac
				before=\$arg
			done
			[[ -z \${spec:-} ]] || sed -i 's/"CAP_SYS_RESOURCE",\?//g' "\$spec"
		fi
		exec "$root/.bin/runc" "\$@"
	SCRIPT
	chmod +x "$work/runtime"
}

start_engine() {
	ip link set lo up
	mount -t tmpfs tmpfs /run
	mkdir -p /run/lock "$work/data"
	write_runtime
	dockerd --data-root "$work/data" --exec-root /run/docker --pidfile /run/docker.pid \
		--cgroup-parent "/$group" --add-runtime "test=$work/runtime" --default-runtime test \
		--host unix:///run/docker.sock >"$work/dockerd.log" 2>&1 &
	engine=$!
	export DOCKER_HOST=unix:///run/docker.sock
	local i
	for ((i = 0; i < 150; i++)); do
		if docker version >/dev/null 2>&1; then
			return 0
		fi
		sleep 0.2
	done
	tail -n 20 "$work/dockerd.log" >&2
	die "dockerd did not start"
}

state_of() { docker inspect --format '{{.State.Health.Status}} {{.State.StartedAt}}' "$(compose ps --quiet "$1")"; }

wait_healthy() {
	local service i
	for service in "$@"; do
		for ((i = 0; i < 150; i++)); do
			if [[ $(state_of "$service") == "healthy "* ]]; then
				continue 2
			fi
			sleep 0.2
		done
		compose logs --tail 20 "$service" >&2
		die "$service did not become healthy"
	done
}

crictl() { "$root/.bin/crictl" --config "$work/crictl.yaml" "$@"; }

start_registry() {
	"$root/.bin/fixture-registry" --sample --guest "$root/.bin/fixture-guest" \
		--busybox "$(command -v busybox)" --cache "$work/images" --addr 127.0.0.1:0 >"$work/registry" 2>"$work/registry.log" &
	local i
	for ((i = 0; i < 600; i++)); do
		if [[ -s $work/registry ]]; then
			registry=$(head -n 1 "$work/registry")
			return 0
		fi
		sleep 0.2
	done
	cat "$work/registry.log" >&2
	die "the registry did not start"
}

write_pod() {
	cat >"$work/pod.json" <<-JSON
		{"metadata": {"name": "sample", "namespace": "default", "uid": "compose-$1", "attempt": 0}, "hostname": "sample",
		 "log_directory": "/var/log/pods/compose-$1", "linux": {"cgroup_parent": "/$group"}}
	JSON
	cat >"$work/container.json" <<-JSON
		{"metadata": {"name": "sample"}, "image": {"image": "$registry/sample:latest"},
		 "args": ["-seconds", "2"], "log_path": "sample.log", "linux": {}}
	JSON
}

run_pod() {
	local pod container i
	write_pod "$1"
	pod=$(crictl runp "$work/pod.json")
	container=$(crictl create "$pod" "$work/container.json" "$work/pod.json")
	printf '%s\n' "$pod" "$container" >>"$work/ids"
	crictl start "$container" >/dev/null
	for ((i = 0; i < 100; i++)); do
		if [[ $(crictl inspect -o go-template --template '{{.status.state}}' "$container") == CONTAINER_EXITED ]]; then
			break
		fi
		sleep 0.2
	done
	[[ $(crictl inspect -o go-template --template '{{.status.state}} {{.status.exitCode}}' "$container") == "CONTAINER_EXITED 0" ]] ||
		die "the container of pod $1 did not end with status 0"
	[[ $(crictl logs "$container") == *"line 2"* ]] || die "pod $1 logged nothing"
	crictl rmp --force "$pod" >/dev/null
	step "pod $1 ran: IP, log and status are right"
}

inside() {
	start_engine
	step "engine $(docker version --format '{{.Server.Version}}')"
	DOCKER_BUILDKIT=0 "$root/deploy/docker/build.sh" "$tag" 2>/dev/null
	step "images are built"
	mount -t tmpfs tmpfs /var/log/pods 2>/dev/null || { mkdir -p "$work/pods" /var/log/pods && mount --bind "$work/pods" /var/log/pods; }
	compose up --detach || { compose logs --tail 20 >&2 && die "the stack did not come up"; }
	wait_healthy eventbus sandboxd nri-hub cri-gateway
	step "four services are healthy"
	local endpoint
	endpoint=unix://$(docker volume inspect --format '{{.Mountpoint}}' crisp_run)/cri.sock
	printf '%s: %s\n' runtime-endpoint "$endpoint" image-endpoint "$endpoint" timeout 60 >"$work/crictl.yaml"
	start_registry
	crictl pull "$registry/sample:latest"
	run_pod first

	local before after
	before=$(state_of cri-gateway)
	compose restart nri-hub
	wait_healthy nri-hub
	after=$(state_of cri-gateway)
	[[ ${before#* } == "${after#* }" ]] || die "the gateway was restarted together with nri-hub"
	run_pod second

	[[ -z $(crictl pods --quiet)$(crictl ps --all --quiet) ]] || die "pods are left"
	compose down --volumes --remove-orphans
	[[ -z $(docker ps --all --quiet) ]] || die "containers are left"
	[[ -z $(docker volume ls --quiet) ]] || die "volumes are left"
	docker image rm "crisp/"{eventbus,sandboxd,nri-hub,cri-gateway}":$tag" >/dev/null
	if pgrep --full --list-full '^/usr/bin/(sandboxd|nri-hub|cri-gateway|eventbus|containerd-shim)|-namespace k8s.io'; then
		die "processes are left"
	fi
	step "the stack is down without a trace"
	kill "$engine"
	wait "$engine" || true
}

if [[ ${2:-} == inside ]]; then
	inside
else
	outside
fi
