# shellcheck shell=bash
# Lays out the state folder of `make run`: programs, configuration, pod files. Each configuration
# file names only what differs from the default. Sourced; expects $STATE, $root and network.sh.

SAMPLE_IMAGE=crisp.local/sample:latest
SAMPLE_SECONDS=5
BUS_PORT=14222

admin_port() {
	case $1 in
	cri-gateway) echo 19670 ;;
	sandboxd) echo 19671 ;;
	nri-hub) echo 19672 ;;
	eventbus) echo 19673 ;;
	esac
}

write_state() {
	local group
	group=$(id -g nobody)
	mkdir -p "$STATE"/{bin,etc,log,hosts,nri,net.d,saved,lib,bus,run}
	[[ -d /run/containerd ]] || touch "$STATE/saved/no-run-containerd"
	# The sticky bit lets the unprivileged processes make their own sockets only.
	chown "root:$group" "$STATE/run" && chmod 1775 "$STATE/run"
	chown "nobody:$group" "$STATE/nri" "$STATE/bus" && chmod 0700 "$STATE/bus"
	# Copies: ordinary users may not be able to enter the checkout, and programs started from here
	# can be told from all others.
	cp "${root:?}"/.bin/{cri-gateway,sandboxd,nri-hub,eventbus,crisp-init,containerd-shim-crisp-v1,containerd-shim-runc-v2,runc,fixture-registry,fixture-guest} "$STATE/bin/"
	write_configs "$group"
	write_network
	write_pod
}

write_configs() {
	local group=$1 name
	for name in cri-gateway sandboxd nri-hub eventbus; do
		"write_${name//-/_}" "$group" >"$STATE/etc/$name.toml"
		"$STATE/bin/$name" config check --config "$STATE/etc/$name.toml" >/dev/null
	done
	cat >"$STATE/etc/crictl.yaml" <<-YAML
		runtime-endpoint: unix://$STATE/run/cri.sock
		image-endpoint: unix://$STATE/run/cri.sock
		timeout: 60
	YAML
}

write_head() { printf 'version = 1\n\n[admin]\nlisten = "127.0.0.1:%s"\n\n' "$(admin_port "$1")"; }

write_cri_gateway() {
	write_head cri-gateway
	cat <<-TOML
		[cri.socket]
		path = "$STATE/run/cri.sock"

		[sandboxd]
		socket = "$STATE/run/sandboxd.sock"

		[nri]
		socket = "$STATE/run/nri-hub.sock"

		[events]
		url = "nats://127.0.0.1:$BUS_PORT"
		nkey_seed_file = "$STATE/bus/keys/gateway.nk"
	TOML
}

write_sandboxd() {
	printf 'root = "%s/lib"\nstate = "%s/run"\n' "$STATE" "$STATE"
	write_head sandboxd
	cat <<-TOML
		[server]
		socket = {path = "$STATE/run/sandboxd.sock", mode = "0660", group = "$1"}

		[bus.client]
		url = "nats://127.0.0.1:$BUS_PORT"
		nkey_seed_file = "$STATE/bus/keys/sandboxd.nk"

		# The shims are found beside sandboxd.
		[runtime.handlers.crisp]
		runtime_type = "io.containerd.crisp.v1"
		sandboxer = "shim"
		binary_name = "$STATE/bin/runc"
		runtime_root = "$STATE/runc"

		[runtime.handlers.runc]
		runtime_type = "io.containerd.runc.v2"
		sandboxer = "podsandbox"
		binary_name = "$STATE/bin/runc"
		runtime_root = "$STATE/runc"

		[image]
		registry_config = ["$STATE/hosts"]

		[network]
		conf_dir = "$STATE/net.d"
		bin_dirs = ["$root/.bin/cni"]
	TOML
}

write_nri_hub() {
	printf 'run_folder = "%s/run/nri-hub"\n' "$STATE"
	write_head nri-hub
	cat <<-TOML
		[server.socket]
		path = "$STATE/run/nri-hub.sock"

		[nri.socket]
		path = "$STATE/nri/nri.sock"

		[launch]
		folder = "$STATE/nri/plugins"
		config_folder = "$STATE/nri/conf.d"
		wasm_cache = "$STATE/run/nri-hub/wasm"
	TOML
}

write_eventbus() {
	write_head eventbus
	cat <<-TOML
		[rpc.socket]
		path = "$STATE/run/eventbus.sock"

		[broker]
		listen = "127.0.0.1:$BUS_PORT"
		store_dir = "$STATE/bus/jetstream"

		[access]
		keys_dir = "$STATE/bus/keys"
	TOML
}

write_network() {
	cat >"$STATE/net.d/10-crisp-run.conflist" <<-JSON
		{
		  "cniVersion": "1.0.0",
		  "name": "crisp-run",
		  "plugins": [
		    {
		      "type": "bridge", "bridge": "$BRIDGE", "isGateway": true, "ipMasq": false, "hairpinMode": true,
		      "ipam": {
		        "type": "host-local", "dataDir": "$STATE/addresses",
		        "ranges": [[{"subnet": "$SUBNET"}]], "routes": [{"dst": "0.0.0.0/0"}]
		      }
		    },
		    {"type": "portmap", "capabilities": {"portMappings": true}, "snat": true}
		  ]
		}
	JSON
}

write_pod() {
	cat >"$STATE/etc/pod.json" <<-JSON
		{
		  "metadata": {"name": "sample", "namespace": "default", "uid": "sample-1", "attempt": 0},
		  "hostname": "sample",
		  "log_directory": "$STATE/log/pods/sample",
		  "linux": {"cgroup_parent": "/$CGROUP"}
		}
	JSON
	cat >"$STATE/etc/container.json" <<-JSON
		{
		  "metadata": {"name": "sample", "attempt": 0},
		  "image": {"image": "$SAMPLE_IMAGE"},
		  "args": ["-seconds", "$SAMPLE_SECONDS"],
		  "log_path": "sample.log",
		  "linux": {}
		}
	JSON
}
