#!/usr/bin/env bash
# Installs Crisp as docs/operations.md says on a Debian 13 that is booted in a virtual machine, and runs
# the conformance tests there: with systemd and its cgroup driver, cgroup v2 and AppArmor, which the
# machine that builds may have none of. Needs root, debootstrap and qemu (deploy/run/install.sh --vm), and
# a package mirror the first time. Without KVM the processor is emulated and all takes an hour.
#
#   test.sh [HANDLER] [FOCUS]    the default runtime handler, and specs to select
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(cd "$here/../.." && pwd)
bin=$top/.bin
handler=${1:-crisp}
focus=${2:-}
mirror=${VM_MIRROR:-http://deb.debian.org/debian}
base=$bin/vm/base.tar

work=$(mktemp -d)
# Thousands of small files that are synced one by one: a file system in memory has no disk to wait for.
mount -t tmpfs -o size=8g crisp-vm "$work"
cleanup() {
	umount --recursive --lazy "$work"
	rmdir "$work"
}
trap cleanup EXIT
root=$work/root

if [[ ! -e $base ]]; then
	echo "making a Debian 13 from $mirror"
	packages=systemd,systemd-sysv,dbus,udev,kmod,procps,iproute2,iptables,nftables,conntrack
	packages+=,linux-image-cloud-amd64,initramfs-tools,apparmor,busybox,ca-certificates,sudo
	debootstrap --variant=minbase --include=$packages trixie "$root" "$mirror" >"$work/log" 2>&1 ||
		{ tail -n 20 "$work/log" >&2; exit 1; }
	rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
	mkdir -p "$(dirname "$base")"
	tar -C "$work" -cf "$base.new" root
	mv "$base.new" "$base"
else
	tar -C "$work" -xf "$base"
fi

# What docs/operations.md has an operator do.
cd "$top"
install -m 0755 "$bin"/{cri-gateway,sandboxd,nri-hub,eventbus,crisp-init,containerd-shim-crisp-v1} "$root/usr/local/bin/"
install -m 0755 "$bin"/{containerd-shim-runc-v2,runc,crictl} "$root/usr/local/bin/"
install -m 0755 -D -t "$root/opt/cni/bin" "$bin"/cni/*
install -m 0644 deploy/systemd/*.service deploy/systemd/*.socket deploy/systemd/crisp.target "$root/etc/systemd/system/"
install -m 0644 deploy/systemd/crisp.sysusers.conf "$root/usr/lib/sysusers.d/crisp.conf"
install -m 0644 deploy/systemd/crisp.tmpfiles.conf "$root/usr/lib/tmpfiles.d/crisp.conf"
install -m 0644 -D -t "$root/etc/crisp" deploy/config/*.toml
install -m 0644 -D -t "$root/etc/cni/net.d" deploy/cni/10-crisp.conflist
install -m 0644 /dev/stdin -D "$root/etc/crisp/sandboxd.toml.d/handler.toml" <<<"runtime.default_handler = \"$handler\""

# The tests, and the unit that runs them.
install -m 0755 -D -t "$root/opt/crisp/.bin" "$bin"/{conformance,critest,fixture-guest}
for module in go.work proto services/internal services/{cri-gateway,sandboxd,nri-hub,eventbus} tests; do
	[[ -d $module ]] && module+=/go.mod
	install -m 0644 -D "$module" "$root/opt/crisp/$module"
done
install -m 0755 "$here/guest.sh" "$root/opt/crisp/"
install -m 0644 "$here/crisp-test.service" "$root/etc/systemd/system/"
printf '%s' "$focus" >"$root/opt/crisp/focus"
echo crisp-vm >"$root/etc/hostname"
wants=$root/etc/systemd/system/multi-user.target.wants
mkdir -p "$wants"
ln -sf /etc/systemd/system/crisp.target /etc/systemd/system/crisp-test.service "$wants/"

mke2fs -q -t ext4 -d "$root" "$work/disk" 3g
cp "$root"/boot/vmlinuz-* "$work/kernel"
cp "$root"/boot/initrd.img-* "$work/initrd"
rm -rf "$root"

fast=(-accel tcg,thread=multi -cpu max)
[[ -w /dev/kvm ]] && fast=(-accel kvm -cpu host)
qemu-system-x86_64 "${fast[@]}" -smp 2 -m 4096 -display none -no-reboot -serial "file:$work/console" -net none \
	-kernel "$work/kernel" -initrd "$work/initrd" -drive "file=$work/disk,format=raw,if=virtio" \
	-append 'root=/dev/vda rw console=ttyS0 quiet systemd.show_status=0' </dev/null &
machine=$!
tail --lines=+1 --follow=name --retry --quiet --pid=$machine "$work/console" 2>/dev/null | sed -un 's/^.*\(guest: \)/\1/p'
wait $machine
if ! grep -q '^guest: passed' "$work/console"; then
	tail -n 60 "$work/console" >&2
	echo "vm: failed" >&2
	exit 1
fi
echo "vm: passed"
