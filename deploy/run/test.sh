#!/usr/bin/env bash
# Tests run.sh as a user meets it: a run that ends by itself, one that is ended with Ctrl-C while a
# pod runs, and one that is killed half way and followed by another. After each, nothing may be
# left. Needs root. It runs in network, mount and process namespaces of its own.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export CRISP_RUN_DIR=${CRISP_RUN_DIR:-/var/lib/crisp-run-test}
output=$(mktemp)

die() {
	tail -n 60 "$output" >&2
	printf 'test.sh: %s\n' "$*" >&2
	exit 1
}

# snapshot lists what a run could leave: in these namespaces there is nobody else.
snapshot() {
	local exe
	for exe in /proc/[0-9]*/exe; do
		exe=$(readlink "$exe") && [[ $exe != */bash ]] && echo "process $exe"
	done
	awk '{print "mount", $5}' /proc/self/mountinfo | sort
	ip -oneline link | awk '{print "link", $2}'
	iptables-save | grep -v '^#' || true
	echo "ip_forward $(cat /proc/sys/net/ipv4/ip_forward)"
	find /sys/fs/cgroup -type d -name crisp-run
	find "$CRISP_RUN_DIR" /run/containerd /run/netns /var/lib/cni 2>/dev/null || true
}

nothing_left() {
	local now
	now=$(snapshot)
	[[ $now == "$before" ]] || die "$1 left behind: $(diff <(echo "$before") <(echo "$now"))"
	echo "--- $1: nothing is left"
}

# begin starts run.sh as a terminal would: with SIGINT not ignored, in a process group of its own.
begin() {
	env --default-signal=INT,QUIT setsid "$here/run.sh" "$@" </dev/null >"$output" 2>&1 &
	run=$!
}

await() {
	local end=$((SECONDS + 300))
	until grep -q "$1" "$output"; do
		kill -0 "$run" 2>/dev/null || die "run.sh ended before it said: $1"
		((SECONDS < end)) || die "run.sh did not say: $1"
		sleep 0.1
	done
}

inside() {
	ip link set lo up
	before=$(snapshot)

	begin --once
	wait "$run" || die "run.sh --once failed"
	local line
	for line in 'has IP 10\.' 'log | .*line 2' 'event | .*/tasks/exit .*exit=0' 'ended with status 0' 'everything is gone'; do
		grep -q "$line" "$output" || die "the output has no line like: $line"
	done
	nothing_left "a run that ends by itself"

	begin
	await 'Ctrl-C ends everything'
	kill -INT -- "-$run"
	wait "$run" || die "run.sh ended with status $? after Ctrl-C"
	nothing_left "a run that is ended with Ctrl-C"

	begin
	await 'is running'
	kill -KILL -- "-$run"
	wait "$run" 2>/dev/null || true
	begin --once
	wait "$run" || die "run.sh --once failed after a run that was killed"
	grep -q 'clearing what an earlier run left' "$output" || die "the second run found nothing of the first"
	nothing_left "a run that is killed, and the next"
	rm -f "$output"
	echo "run: passed"
}

if [[ ${1:-} == inside ]]; then
	inside
else
	[[ $(id -u) == 0 ]] || die "containers need root: run this as root"
	exec unshare --net --mount --pid --fork --kill-child --mount-proc --propagation private "${BASH_SOURCE[0]}" inside
fi
