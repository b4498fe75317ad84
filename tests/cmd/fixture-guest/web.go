package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	nginxPidFile = "/var/run/nginx.pid"
	nginxTitle   = "nginx: master process nginx -g daemon off;"
	nginxPage    = `<!DOCTYPE html>
<html>
<head><title>Welcome to nginx!</title></head>
<body>
<h1>Welcome to nginx!</h1>
<p>This page is served by the test fixture.</p>
</body>
</html>
`
	httpdPage = "<html><body><h1>It works!</h1></body></html>\n"
)

// serveNginx looks to its surroundings like nginx: the process title of a
// master process, a pid file, a welcome page. The port is the first argument
// that is a number, else 80.
func serveNginx(ctx context.Context, args []string, out io.Writer) error {
	if args[0] != nginxTitle {
		argv := append([]string{nginxTitle}, args[1:]...)
		return syscall.Exec("/proc/self/exe", argv, os.Environ())
	}
	port := 80
	for _, arg := range args[1:] {
		if n, err := strconv.Atoi(arg); err == nil {
			port = n
		}
	}
	err := os.WriteFile(nginxPidFile, fmt.Appendf(nil, "%d\n", os.Getpid()), 0o644)
	if err != nil {
		return err
	}
	return serve(ctx, port, nginxPage, out)
}

// serveHTTPD prints the start line of Apache's httpd and serves its page.
func serveHTTPD(ctx context.Context, out io.Writer) error {
	_, err := fmt.Fprintf(out, "[%s] [mpm_event:notice] [pid %d] AH00489: Apache/2.4.39 (Unix) configured -- resuming normal operations\n"+
		"[core:notice] AH00094: Command line: 'httpd -D FOREGROUND'\n", time.Now().UTC().Format(time.ANSIC), os.Getpid())
	if err != nil {
		return err
	}
	return serve(ctx, 80, httpdPage, out)
}

// serve answers each HTTP request on the port with the page, until ctx ends.
// It speaks just enough HTTP to keep net/http, and so megabytes, out of the images.
func serve(ctx context.Context, port int, page string, out io.Writer) error {
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", ":"+strconv.Itoa(port))
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		conn, err := listener.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		wg.Go(func() { answer(ctx, conn, page, out) })
	}
}

// answer serves one connection, request after request.
func answer(ctx context.Context, conn net.Conn, page string, out io.Writer) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	defer func() { _ = conn.Close() }()
	in := bufio.NewReader(conn)
	for {
		request, err := readRequest(in)
		if err != nil {
			return
		}
		fmt.Fprintf(out, "%s - - %q 200 %d\n", conn.RemoteAddr(), request, len(page))
		_, err = fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nServer: fixture\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n%s", len(page), page)
		if err != nil {
			return
		}
	}
}

// readRequest reads a request without a body and gives back its first line.
func readRequest(in *bufio.Reader) (string, error) {
	first := ""
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return "", err
		}
		line = strings.TrimRight(line, "\r\n")
		switch {
		case line == "" && first != "":
			return first, nil
		case first == "":
			first = line
		}
	}
}
