# shellcheck shell=bash
# The host's side of the pod network of `make run`: one masquerade rule for all pods instead of one
# per pod, and what a FORWARD policy of DROP asks for. Sourced; expects $STATE.

BRIDGE=crisp-run0
SUBNET=10.213.0.0/24
FORWARDING=/proc/sys/net/ipv4/ip_forward

# Each line is a rule, without the flag that adds, checks or removes it.
network_rules() {
	local mark="-m comment --comment crisp-run"
	echo "nat POSTROUTING -s $SUBNET ! -d $SUBNET $mark -j MASQUERADE"
	echo "filter FORWARD -s $SUBNET $mark -j ACCEPT"
	echo "filter FORWARD -d $SUBNET $mark -j ACCEPT"
}

network_up() {
	mkdir -p "$STATE/saved"
	# After a crash the first value is the true one.
	[[ -e $STATE/saved/ip_forward ]] || cat "$FORWARDING" >"$STATE/saved/ip_forward"
	grep -q '^\*nat' <<<"$(iptables-save)" || touch "$STATE/saved/no-nat-table"
	echo 1 >"$FORWARDING"
	local drop=no table chain rule
	if [[ $(iptables -w -S FORWARD | head -n 1) == "-P FORWARD DROP" ]]; then
		drop=yes
	fi
	while read -r table chain rule; do
		if [[ $table == nat || $drop == yes ]]; then
			# shellcheck disable=SC2086 # the rule is a list of words
			iptables -w -t "$table" -I "$chain" $rule
		fi
	done < <(network_rules)
}

network_down() {
	local table chain rule
	while read -r table chain rule; do
		# shellcheck disable=SC2086 # the rule is a list of words
		while iptables -w -t "$table" -D "$chain" $rule 2>/dev/null; do :; done
	done < <(network_rules)
	host_port_chains_down
	# The first nat rule makes the table; an empty one that was not there before goes again.
	if [[ -e $STATE/saved/no-nat-table ]] && ! grep -qE '^(-A|:[^ ]+ -)' <<<"$(iptables-save -t nat)"; then
		nft delete table ip nat 2>/dev/null || true
	fi
	if ip link show "$BRIDGE" >/dev/null 2>&1; then
		ip link delete "$BRIDGE"
	fi
	if [[ -e $STATE/saved/ip_forward ]]; then
		cat "$STATE/saved/ip_forward" >"$FORWARDING"
		rm -f "$STATE/saved/ip_forward"
	fi
}

# The portmap plugin keeps its top chains when the last pod with a host port has gone. They go
# with the run that made them, unless another network's pods use them.
host_port_chains_down() {
	[[ -e $STATE/saved/no-nat-table ]] || return 0
	local chain rule
	if grep -qE '^-A CNI-HOSTPORT-DNAT ' <<<"$(iptables-save -t nat 2>/dev/null)"; then
		return 0
	fi
	while read -r rule; do
		# shellcheck disable=SC2086 # the rule is a list of words
		eval iptables -w -t nat -D ${rule#-A } 2>/dev/null || true
	done < <(iptables-save -t nat 2>/dev/null | grep -E '^-A .*-j CNI-HOSTPORT-' || true)
	for chain in CNI-HOSTPORT-DNAT CNI-HOSTPORT-MASQ CNI-HOSTPORT-SETMARK; do
		iptables -w -t nat -F "$chain" 2>/dev/null || true
		iptables -w -t nat -X "$chain" 2>/dev/null || true
	done
}

network_left() {
	if ip link show "$BRIDGE" >/dev/null 2>&1; then
		echo "network link $BRIDGE"
	fi
	iptables-save 2>/dev/null | grep -e '--comment crisp-run' | sed 's/^/iptables rule /' || true
}
