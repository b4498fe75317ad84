#!/usr/bin/env bash
# Runs in the virtual machine of test.sh, which shows the lines that begin with "guest: ".
set -uo pipefail

export HOME=/root CRISP_TEST_GUEST=/opt/crisp/.bin/fixture-guest CRISP_TEST_BUSYBOX=/usr/bin/busybox
cri=unix:///run/crisp/cri.sock
cd /opt/crisp
sysctl -qw net.ipv4.ip_forward=1

say() { sed 's/^/guest: /'; }
fail() {
	echo "$*" | say
	journalctl --no-pager --output cat --lines 200 --unit 'crisp-*'
	sync
	exit 1
}

echo "$(uname -r), cgroups: $(stat -fc %T /sys/fs/cgroup), $(systemctl --version | head -n 1)" | say
for _ in {1..120}; do
	crictl --runtime-endpoint $cri info &>/dev/null && break
	sleep 1
done
crictl --runtime-endpoint $cri info >/dev/null || fail "the runtime does not answer"
crictl --runtime-endpoint $cri runtime-config | say
failed=$(systemctl list-units --failed --no-legend)
[[ -z $failed ]] || fail "failed units: $failed"

mkdir -p /etc/crisp/certs.d
focus=$(<focus)
.bin/conformance --endpoint $cri --nri-socket /var/run/nri/nri.sock --hosts-dir /etc/crisp/certs.d ${focus:+--focus "$focus"} 2>&1 | say
((PIPESTATUS[0] == 0)) || fail "conformance failed"

# The processes are replaced under a pod, as an upgrade does it; no unit holds a container back.
systemctl restart crisp-sandboxd crisp-nri-hub crisp-eventbus crisp-cri-gateway || fail "restart failed"
sandboxd check-state 2>&1 | say
((PIPESTATUS[0] == 0)) || fail "check-state failed"
left=$(systemctl list-units --no-legend --type scope,slice | grep -E 'crisp-[0-9a-f]{64}') && fail "left in systemd: $left"
echo passed | say
sync
