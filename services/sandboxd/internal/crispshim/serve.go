package crispshim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	sandboxapi "github.com/containerd/containerd/api/runtime/sandbox/v1"
	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"github.com/containerd/go-runc"
	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/attach"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/publish"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/reaper"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/service"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/task"
)

const (
	// socketFD is the descriptor at which the start command passes the socket.
	socketFD = 3
	// maxProcs keeps the threads few, which each cost memory.
	maxProcs = 2
	// folderVariable names the folder in which the runtime client puts what it passes to the
	// runtime: descriptions of execs, with the environment in them, and sockets of terminals. It is
	// the shim's bundle, with which it goes if the shim is killed meanwhile, by a path that is short
	// enough for a socket. The runtime is always told its own folder and does not go by it.
	folderVariable = "XDG_RUNTIME_DIR"
	// gcPercent keeps the heap close to what is in use.
	gcPercent = 30
	// flushTime bounds the sending of the last events when the shim ends.
	flushTime = time.Second
	// answersTime bounds the sending of the last answers.
	answersTime = 500 * time.Millisecond
)

// serveInherited is the shim with the socket that the start command made.
func serveInherited(ctx context.Context, i invocation) error {
	l, err := net.FileListener(os.NewFile(socketFD, "socket"))
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	return serve(ctx, i, l, func() error { return nil })
}

// serve is the shim itself, which listens on l. ready is called when nothing can fail any
// more, and before the service, so that who is told can connect meanwhile. serve returns when
// the shim was told to end.
func serve(ctx context.Context, i invocation, l net.Listener, ready func() error) error {
	runtime.GOMAXPROCS(maxProcs)
	debug.SetGCPercent(gcPercent)
	wd, err := os.Getwd()
	if err != nil {
		return err
	}
	// Orphans of the containers, and the containers themselves, become children of the shim.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("child subreaper: %w", err)
	}
	log, err := openLog(i.debug)
	if err != nil {
		return err
	}
	if err := ready(); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	s := &shim{
		stop: stop, log: log, reaper: reaper.New(), memory: newTrimmer(),
		events: publish.New(os.Getenv("TTRPC_ADDRESS"), i.namespace, log),
	}
	// The runtime client has no other place for these.
	runc.Monitor = s.reaper.Monitor()
	if err := os.Setenv(folderVariable, fmt.Sprintf("/proc/%d/cwd", os.Getpid())); err != nil {
		return err
	}
	host := task.Host{Namespace: i.namespace, Reaper: s.reaper, Publish: s.events.Publish, Log: log}
	var streams *attach.Server
	services := service.New(host, filepath.Join(wd, optionsFile), func(ctx context.Context) error { return streams.Listen(ctx) }, stop)
	streams = attach.NewServer(attach.SocketName, services.Target, log)
	server, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(s.intercept))
	if err != nil {
		return err
	}
	taskapi.RegisterTTRPCTaskService(server, services)
	sandboxapi.RegisterTTRPCSandboxService(server, services)
	err = s.run(ctx, server, l)
	return errors.Join(err, streams.Close(), removeSocket(i.socket))
}

func removeSocket(path string) error {
	if path == "" {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// shim is the running shim.
type shim struct {
	stop   func()
	log    *slog.Logger
	reaper *reaper.Reaper
	events *publish.Publisher
	memory *trimmer
}

// run serves until ctx ends, then ends in order: answers, events, ends of children.
func (s *shim) run(ctx context.Context, server *ttrpc.Server, l net.Listener) error {
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)
	defer signal.Stop(children)
	// A broken pipe is the matter of who writes; it must not end the shim.
	signal.Ignore(unix.SIGPIPE)

	own, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	var wg sync.WaitGroup
	wg.Go(func() { s.reaper.Run(own, children) })
	wg.Go(func() { s.events.Run(own) })
	failed := make(chan error, 1)
	wg.Go(func() {
		err := server.Serve(own, l)
		if errors.Is(err, ttrpc.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
			err = nil
		}
		failed <- err
		s.stop()
	})
	s.memory.touch()
	<-ctx.Done()
	s.memory.close()
	s.finish(own, server)
	end()
	wg.Wait()
	return <-failed
}

// finish sends the last answers and events.
func (s *shim) finish(ctx context.Context, server *ttrpc.Server) {
	flush, cancel := context.WithTimeout(ctx, flushTime)
	s.events.Flush(flush)
	cancel()
	answers, cancel := context.WithTimeout(ctx, answersTime)
	defer cancel()
	if server.Shutdown(answers) != nil {
		_ = server.Close()
	}
}

// intercept maps errors, keeps a panic from ending the pod, and notes that there is work.
func (s *shim) intercept(ctx context.Context, unmarshal ttrpc.Unmarshaler, info *ttrpc.UnaryServerInfo, method ttrpc.Method) (resp any, err error) {
	s.memory.touch()
	defer func() {
		if r := recover(); r != nil {
			s.log.ErrorContext(ctx, "panic", slog.String("rpc", info.FullMethod), slog.Any("panic", r), slog.String("stack", string(debug.Stack())))
			err = fmt.Errorf("panic: %v: %w", r, errdefs.ErrInternal)
		}
		if err != nil {
			s.log.DebugContext(ctx, "call failed", slog.String("rpc", info.FullMethod), slog.String("error", err.Error()))
			err = toStatus(err)
		}
	}()
	return method(ctx, unmarshal)
}
