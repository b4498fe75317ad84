// Command fakeshim is a shim for tests that behaves well or badly after its name: it is
// linked as containerd-shim-<mode>-v1. It runs no containers.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	sandboxapi "github.com/containerd/containerd/api/runtime/sandbox/v1"
	taskv3 "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

func main() {
	if err := run(os.Args); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	mode := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(args[0]), "containerd-shim-"), "-v1")
	switch args[len(args)-1] {
	case "serve":
		return serve(mode)
	case "contained":
		time.Sleep(time.Hour)
		return nil
	case "delete":
		return nil
	case "start":
		return start(mode)
	default:
		return errors.New("unknown action")
	}
}

const socketName = "fake.sock"

func start(mode string) error {
	stdin, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	var params bootapi.BootstrapParams
	if err := proto.Unmarshal(stdin, &params); err != nil || params.GetInstanceID() == "" {
		return fmt.Errorf("no parameters: %w", err)
	}
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	address := "unix://" + filepath.Join(dir, socketName)
	switch mode {
	case "exit1":
		return errors.New("no hypervisor found")
	case "garbage":
		_, err := os.Stdout.Write(bytes.Repeat([]byte("rubbish\n"), 10<<20/8))
		return err
	case "empty":
		return nil
	case "hang":
		// A child that has left the process group must not survive either.
		if err := daemon("mute"); err != nil {
			return err
		}
		time.Sleep(time.Hour)
		return nil
	case "killed":
		if err := daemon("mute"); err != nil {
			return err
		}
		// A socket that nobody was told of.
		if _, err := net.Listen("unix", filepath.Join(params.GetSocketDir(), params.GetInstanceID()[:16])); err != nil {
			return err
		}
		return syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "nobody":
	case "vsock":
		address = "vsock://3:1024"
	case "file":
		address = "unix://" + filepath.Join(dir, "config.json")
	default:
		if err := daemon(mode); err != nil {
			return err
		}
	}
	return answer(mode, address)
}

func answer(mode, address string) error {
	protocol := "ttrpc"
	switch mode {
	case "plain":
		_, err := fmt.Print(address)
		return err
	case "json":
		_, err := fmt.Printf(`{"version":3,"address":%q,"protocol":"ttrpc"}`, address)
		return err
	case "grpc":
		protocol = "grpc"
	}
	out, err := proto.Marshal(&bootapi.BootstrapResult{Version: 3, Address: address, Protocol: protocol})
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(out)
	return err
}

// daemon starts the serving process and waits for its socket.
func daemon(mode string) error {
	cmd := exec.Command(os.Args[0], "serve")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	for range 12000 {
		if _, err := os.Stat(socketName); err == nil {
			return nil
		}
		time.Sleep(5 * time.Millisecond)
	}
	return fmt.Errorf("%s does not serve", mode)
}

func serve(mode string) error {
	l, err := net.Listen("unix", socketName)
	if err != nil {
		return err
	}
	if log, err := os.OpenFile("log", os.O_WRONLY, 0); err == nil {
		fmt.Fprintln(log, `level=warning msg="fake shim serves"`)
	}
	switch mode {
	case "mute", "hang":
		for {
			if _, err := l.Accept(); err != nil {
				return err
			}
		}
	case "liar":
		for {
			c, err := l.Accept()
			if err != nil {
				return err
			}
			_, _ = c.Write(bytes.Repeat([]byte("rubbish\n"), 1000))
		}
	case "grpc":
		s := grpc.NewServer()
		taskv3.RegisterTaskServer(s, grpcTask{onlyTask: &onlyTask{newTask(mode)}})
		return s.Serve(l)
	}
	s, err := ttrpc.NewServer()
	if err != nil {
		return err
	}
	t := newTask(mode)
	switch mode {
	case "plain", "downgrade":
		// The messages of both versions are the same on the wire.
		s.RegisterService("containerd.task.v2.Task", methods(t))
	default:
		taskv3.RegisterTTRPCTaskService(s, t)
	}
	if mode == "sandbox" {
		sandboxapi.RegisterTTRPCSandboxService(s, &sandbox{stopped: make(chan struct{})})
	}
	return s.Serve(context.Background(), l)
}

// exitSoon ends the process after the answer is out.
func exitSoon() { time.AfterFunc(20*time.Millisecond, func() { os.Exit(0) }) }

// methods are those of the task service that the tests of version 2 need.
func methods(t *task) *ttrpc.ServiceDesc {
	return &ttrpc.ServiceDesc{Methods: map[string]ttrpc.Method{
		"Connect": method(t.Connect), "Shutdown": method(t.Shutdown), "Create": method(t.Create), "Start": method(t.Start),
		"Kill": method(t.Kill), "Wait": method(t.Wait), "Delete": method(t.Delete), "Checkpoint": method(t.Checkpoint),
	}}
}

func method[Req, Resp any](fn func(context.Context, *Req) (*Resp, error)) ttrpc.Method {
	return func(ctx context.Context, unmarshal func(any) error) (any, error) {
		req := new(Req)
		if err := unmarshal(req); err != nil {
			return nil, err
		}
		return fn(ctx, req)
	}
}
