# Image of sandboxd with what it starts: the shims, runc and the CNI plugins, all static. build.sh
# makes the context. It runs as root and privileged: it owns the containers of the node.
FROM scratch
ADD rootfs.tar /
ENV PATH=/usr/bin:/opt/cni/bin
ENTRYPOINT ["/usr/bin/sandboxd"]
CMD ["run"]
