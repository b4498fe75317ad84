# Image of the event bus: an embedded NATS JetStream server. build.sh makes the context: one tar file with a static
# program, a passwd file and the folders that volumes are mounted over.
FROM scratch
ADD rootfs.tar /
USER 65532:65532
ENTRYPOINT ["/usr/bin/eventbus"]
CMD ["run"]
