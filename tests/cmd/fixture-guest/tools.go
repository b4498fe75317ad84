package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// ipcs prints the shared memory segments of the own IPC namespace.
func ipcs(args []string, out io.Writer) error {
	for _, arg := range args {
		if arg != "-m" {
			return fmt.Errorf("ipcs: unknown option %q, only -m is known", arg)
		}
	}
	table, err := os.ReadFile("/proc/sysvipc/shm")
	if err != nil {
		return fmt.Errorf("ipcs: %w", err)
	}
	fmt.Fprintf(out, "------ Shared Memory Segments --------\n%-10s %-10s %-10s %-10s\n", "key", "shmid", "perms", "bytes")
	for line := range strings.Lines(string(table)) {
		field := strings.Fields(line)
		if len(field) < 4 || field[0] == "key" {
			continue
		}
		key, err := strconv.ParseInt(field[0], 10, 64)
		if err != nil {
			return fmt.Errorf("ipcs: key %q: %w", field[0], err)
		}
		fmt.Fprintf(out, "0x%08x %-10s %-10s %-10s\n", uint32(key), field[1], field[2], field[3])
	}
	return nil
}

// errNoMatch ends the program with status 1 and without a word.
var errNoMatch = errors.New("")

// pgrep prints the pids of the processes whose name contains the word. As the
// usual program does, it says nothing when there is none, but with its status.
func pgrep(args []string, out io.Writer) error {
	if len(args) != 1 {
		return errors.New("usage: pgrep NAME")
	}
	names, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return err
	}
	found := false
	for _, name := range names {
		pid := filepath.Base(filepath.Dir(name))
		comm, err := os.ReadFile(name)
		if err != nil || pid == strconv.Itoa(os.Getpid()) || !bytes.Contains(comm, []byte(args[0])) {
			continue // A process may end while it is looked at.
		}
		found = true
		fmt.Fprintln(out, pid)
	}
	if !found {
		return errNoMatch
	}
	return nil
}
