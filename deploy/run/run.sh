#!/usr/bin/env bash
# Runs Crisp on this machine in the foreground: the four processes, a bridge network, a registry
# with a sample image, and a sample pod whose IP, log and exit event are shown as they happen.
# Ctrl-C ends all of it and leaves nothing behind. See `run.sh --help`.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
here=$root/deploy/run
STATE=${CRISP_RUN_DIR:-/var/lib/crisp-run}
once=no

usage() {
	cat <<-USAGE
		usage: run.sh [--once]
		  --once  end with status 0 when the sample pod has ended, instead of waiting for Ctrl-C
		environment:
		  CRISP_RUN_DIR  the one folder for all state (default /var/lib/crisp-run); removed at the end
	USAGE
}

for arg in "$@"; do
	case $arg in
	--once) once=yes ;;
	--help | -h) usage && exit 0 ;;
	*) usage >&2 && exit 2 ;;
	esac
done

# shellcheck source=SCRIPTDIR/network.sh
source "$here/network.sh"
# shellcheck source=SCRIPTDIR/sweep.sh
source "$here/sweep.sh"
# shellcheck source=SCRIPTDIR/config.sh
source "$here/config.sh"

say() { printf '== %s\n' "$*"; }
die() { printf 'run.sh: %s\n' "$*" >&2 && exit 1; }

declare -A pid_of=()
started=()
followers=()

check_machine() {
	[[ $(id -u) == 0 ]] || die "containers need root: run this as root"
	[[ $STATE == /*/* ]] || die "CRISP_RUN_DIR=$STATE: want an absolute path below a folder of the root"
	((${#STATE} <= 60)) || die "CRISP_RUN_DIR=$STATE is too long: socket paths have at most 107 bytes"
	command -v go >/dev/null || die "go is not in PATH"
}

# One run at a time per state folder. The lock goes with the process.
take_state() {
	mkdir -p "$STATE"
	exec 9<"$STATE"
	flock --nonblock 9 || die "another run uses $STATE"
	local left
	left=$(leftovers)
	if [[ -n $left || -n $(ls -A "$STATE") ]]; then
		say "clearing what an earlier run left in $STATE"
		[[ -z $left ]] || printf '%s\n' "$left"
		sweep
		find "$STATE" -xdev -mindepth 1 -delete
	fi
	chmod 0755 "$STATE"
}

# launch NAME USER PROGRAM ARGUMENT... starts a process with its own log, outside of the
# terminal's process group so that Ctrl-C reaches this script alone.
launch() {
	local name=$1 user=$2
	shift 2
	local as=()
	if [[ $user != root ]]; then
		as=(setpriv --reuid "$user" --regid "$(id -g "$user")" --clear-groups --no-new-privs --)
	fi
	(
		cd /
		exec 9<&-
		exec setsid env --default-signal=INT,QUIT "${as[@]}" "$@" </dev/null >>"$STATE/log/$name.log" 2>&1
	) &
	pid_of[$name]=$!
	started+=("$name")
}

# wait_for SECONDS NAME COMMAND... polls until the command succeeds or the process NAME ends.
wait_for() {
	local limit=$1 name=$2
	shift 2
	local end=$((SECONDS + limit))
	until "$@" >/dev/null 2>&1; do
		if ! kill -0 "${pid_of[$name]}" 2>/dev/null; then
			die "$name ended before it was ready"
		fi
		if ((SECONDS >= end)); then
			die "$name was not ready within $limit seconds"
		fi
		sleep 0.1
	done
}

# ready PORT asks the admin listener of a process whether it is ready.
ready() {
	local status
	exec 8<>"/dev/tcp/127.0.0.1/$1" || return 1
	printf 'GET /readyz HTTP/1.0\r\n\r\n' >&8
	read -r status <&8
	exec 8<&-
	[[ $status == *" 200 "* ]]
}

start_service() {
	local name=$1 user=$2
	launch "$name" "$user" "$STATE/bin/$name" run --config "$STATE/etc/$name.toml"
	wait_for 30 "$name" ready "$(admin_port "$name")"
	say "$name is ready (user $user, pid ${pid_of[$name]})"
}

crictl=("$root/.bin/crictl" --config "$STATE/etc/crictl.yaml")

cri_ready() {
	local conditions
	conditions=$("${crictl[@]}" info -o go-template --template '{{range .status.conditions}}{{.type}}={{.status}} {{end}}')
	[[ $conditions == *"RuntimeReady=true"* && $conditions == *"NetworkReady=true"* ]]
}

start_registry() {
	launch registry root "$STATE/bin/fixture-registry" --sample --guest "$STATE/bin/fixture-guest" \
		--busybox "$(command -v busybox)" --cache "$STATE/images" --hosts-dir "$STATE/hosts" --hosts crisp.local
	wait_for 60 registry grep -qE '^[0-9.]+:[0-9]+$' "$STATE/log/registry.log"
	say "the sample image is on a registry at $(tail -n 1 "$STATE/log/registry.log")"
}

# follow LABEL COMMAND... shows the lines of a command as they come.
follow() {
	local label=$1
	shift
	"$@" 9<&- > >(sed -u "s/^/$label | /" | tee -a "$STATE/log/$label.txt") 2>>"$STATE/log/$label.err" &
	followers+=("$!")
}

run_sample() {
	local pod container
	: >"$STATE/log/event.txt"
	follow event "$STATE/bin/eventbus" tail --all --config "$STATE/etc/eventbus.toml"
	"${crictl[@]}" pull "$SAMPLE_IMAGE"
	pod=$("${crictl[@]}" runp "$STATE/etc/pod.json")
	say "pod ${pod:0:13} has IP $("${crictl[@]}" inspectp -o go-template --template '{{.status.network.ip}}' "$pod")"
	container=$("${crictl[@]}" create "$pod" "$STATE/etc/container.json" "$STATE/etc/pod.json")
	"${crictl[@]}" start "$container" >/dev/null
	say "container ${container:0:13} is running"
	follow log "${crictl[@]}" logs --follow "$container"
	wait_for 60 cri-gateway grep -q "/tasks/delete container=$container" "$STATE/log/event.txt"
	say "container ended with status $("${crictl[@]}" inspect -o go-template --template '{{.status.exitCode}}' "$container")"
}

explain() {
	cat <<-TEXT

		The runtime is up. In another terminal:
		  $root/.bin/crictl --config $STATE/etc/crictl.yaml pods
		  $root/.bin/crictl --config $STATE/etc/crictl.yaml ps --all
		  $STATE/bin/eventbus tail --config $STATE/etc/eventbus.toml
		A kubelet uses it with
		  --container-runtime-endpoint=unix://$STATE/run/cri.sock
		Logs of the processes are in $STATE/log. Ctrl-C ends everything and removes $STATE.

	TEXT
}

remove_pods() {
	[[ -n ${pid_of["cri-gateway"]:-} ]] || return 0
	"${crictl[@]}" rmp --all --force >/dev/null 2>>"$STATE/log/end.err" || true
	"${crictl[@]}" rmi --all >/dev/null 2>>"$STATE/log/end.err" || true
}

stop_process() {
	local pid=${pid_of[$1]} end=$((SECONDS + 25))
	kill -TERM "$pid" 2>/dev/null || return 0
	while kill -0 "$pid" 2>/dev/null; do
		if ((SECONDS >= end)); then
			echo "$1 did not stop in time" >&2
			return 1
		fi
		sleep 0.05
	done
}

# finish takes everything down in reverse order. It is the one way out, whatever happened before.
finish() {
	local status=$? i left="" follower log
	trap '' INT TERM HUP
	trap - EXIT
	set +e
	if ((status != 0)); then
		for log in "$STATE"/log/*.log; do
			printf -- '-- the end of %s\n' "$log"
			tail -n 10 "$log" | cut -c -1000
		done >&2
	fi
	say "stopping"
	remove_pods
	for follower in "${followers[@]}"; do
		kill -TERM "$follower" 2>/dev/null
	done
	for ((i = ${#started[@]} - 1; i >= 0; i--)); do
		stop_process "${started[i]}" || status=1
	done
	pod_cgroup_down
	network_down
	for ((i = 0; i < 50; i++)); do
		left=$(leftovers)
		[[ -n $left ]] || break
		sleep 0.1
	done
	if [[ -n $left ]]; then
		printf 'left behind, removed by force:\n%s\n' "$left" >&2
		status=1
		sweep
	fi
	sweep_files || status=1
	if ((status == 0)); then
		say "everything is gone"
	fi
	exit "$status"
}

main() {
	check_machine
	"$here/install.sh"
	make --no-print-directory -C "$root" build parts
	take_state
	trap finish EXIT
	trap 'exit 0' INT TERM HUP
	write_state
	network_up
	start_service eventbus nobody
	start_service sandboxd root
	start_service nri-hub nobody
	start_service cri-gateway nobody
	wait_for 30 cri-gateway cri_ready
	say "the runtime and its network are ready"
	start_registry
	run_sample
	if [[ $once == yes ]]; then
		exit 0
	fi
	explain
	# A signal ends this wait, the end of any of the processes as well.
	wait -n "${pid_of[@]}" || true
	local name
	for name in "${started[@]}"; do
		kill -0 "${pid_of[$name]}" 2>/dev/null || die "$name ended"
	done
}

main
