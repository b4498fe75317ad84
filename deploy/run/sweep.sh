# shellcheck shell=bash
# Finds and removes what a run left behind, by force and without the help of the processes:
# for the next run after a crash, and as the last resort of an orderly end. Sourced; expects
# $STATE and network.sh.
#
# Everything of a run can be told from the rest of the machine: its programs are started from
# $STATE/bin, its mounts lie below $STATE, its containers' ids are folder names below $STATE.

CGROUP=crisp-run

# Processes that run a program of this state folder. Zombies have no program any more.
run_pids() {
	local exe pid
	for exe in /proc/[0-9]*/exe; do
		if [[ $(readlink "$exe" 2>/dev/null) == "$STATE/bin/"* ]]; then
			pid=${exe#/proc/}
			echo "${pid%/exe}"
		fi
	done
}

# cgroups whose name is a container or sandbox id of this run.
run_cgroups() {
	local ids
	ids=$(find "$STATE" -xdev -regextype posix-extended -regex '.*/[0-9a-f]{64}' -printf '%f\n' 2>/dev/null | sort -u)
	[[ -n $ids ]] || return 0
	find /sys/fs/cgroup -depth -type d -regextype posix-extended -regex '.*/(crisp-)?[0-9a-f]{64}(\.scope)?' 2>/dev/null |
		grep -F "$ids" || true
}

# The parents of the pods' cgroups stay when the last pod has gone: that of the sample pod, and
# that of pods which name none. One that is in use cannot be removed.
pod_cgroup_down() {
	find /sys/fs/cgroup -depth -type d \( -name "$CGROUP" -o -name crisp \) -exec rmdir {} + 2>/dev/null || true
}

run_mounts() {
	awk -v below="$STATE/" 'index($5, below) == 1 {print $5}' /proc/self/mountinfo | sort -r
}

# Prints what is there of a run; nothing after an orderly end.
leftovers() {
	local pid
	for pid in $(run_pids); do
		echo "process $pid $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null)"
	done
	run_mounts | sed 's/^/mount /'
	run_cgroups | sed 's/^/cgroup /'
	shim_sockets | sed 's/^/socket /'
	network_left
}

# Sockets that shims made outside of the state folder, as their bundles tell.
shim_sockets() {
	grep -rhoaE 'unix:///?run/containerd/s/[0-9a-f]+' "$STATE/run" 2>/dev/null | sed -E 's#^unix://##' | sort -u |
		while read -r socket; do
			[[ ! -S $socket ]] || echo "$socket"
		done || true
}

sweep() {
	local pids cgroup procs mount
	pids=$(run_pids)
	if [[ -n $pids ]]; then
		# shellcheck disable=SC2086 # a list of numbers
		kill -KILL $pids 2>/dev/null || true
	fi
	run_cgroups >"$STATE/cgroups"
	while read -r cgroup; do
		procs=$(cat "$cgroup/cgroup.procs" 2>/dev/null || true)
		# shellcheck disable=SC2086 # a list of numbers
		[[ -z $procs ]] || kill -KILL $procs 2>/dev/null || true
	done <"$STATE/cgroups"
	sleep 0.2
	while read -r cgroup; do
		rmdir "$cgroup" 2>/dev/null || true
	done <"$STATE/cgroups"
	run_mounts | while read -r mount; do
		umount --lazy "$mount" || true
	done
	shim_sockets | xargs --no-run-if-empty rm -f
	pod_cgroup_down
	network_down
}

# Removes the state folder itself. A mount that is still there stops it.
sweep_files() {
	if [[ -n $(run_mounts) ]]; then
		echo "mounts remain below $STATE" >&2
		return 1
	fi
	local own_run_containerd=no
	[[ ! -e $STATE/saved/no-run-containerd ]] || own_run_containerd=yes
	rm -rf --one-file-system "$STATE"
	if [[ $own_run_containerd == yes ]]; then
		rmdir /run/containerd/s /run/containerd 2>/dev/null || true
	fi
}
