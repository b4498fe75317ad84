// Package preflight looks at a container's program just before it runs, while the process
// that is about to become it waits.
//
// An OCI runtime reports a missing program, but not one that the kernel refuses: a script
// whose interpreter is missing, a program of another machine, a dynamic one without its
// loader, a command line that is too long. Its start has then succeeded, and the container ends with a code that says
// nothing. This package finds such programs first. It objects only to what is certain and
// is silent about all else. It follows links inside the container's root only, changes
// nothing, and is safe for concurrent use.
package preflight

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// headSize is what the kernel reads of a program to recognise it.
const headSize = 256

// Programs checks programs.
type Programs struct{}

// Check says why the program of a created container, whose first process is pid, cannot be
// run. It returns nil for one that can be run and for one that it cannot judge, such as
// that of a container in a virtual machine. Errors: ErrFailedPrecondition naming the file.
func (Programs) Check(containerID string, pid uint32, process *specs.Process) error {
	if process == nil || len(process.Args) == 0 || !isOf(pid, containerID) {
		return nil
	}
	if err := fits(process, argumentSpace(pid)); err != nil {
		return err
	}
	root, err := openRoot(fmt.Sprintf("/proc/%d/root", pid))
	if err != nil {
		return nil
	}
	defer func() { _ = root.Close() }()
	path, file := find(root, process)
	if file == nil {
		return nil
	}
	defer func() { _ = file.Close() }()
	if err := runnable(root, file, foreignFormats()); err != nil {
		return fmt.Errorf("program %q: %w: %w", path, err, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// CheckExec says why a command cannot be run in a container whose first process is pid: if no
// limits of its own would let the kernel take its arguments. OCI runtimes find out when they are the
// command already, which then has ended with a code as of its own.
func (Programs) CheckExec(containerID string, pid uint32, process *specs.Process) error {
	if !isOf(pid, containerID) {
		return nil
	}
	return fits(process, mostSpace)
}

// What the kernel takes for arguments and environment, whatever the limits of a process are.
const leastSpace, mostSpace = 128 << 10, 6 << 20

// argumentSpace is how many bytes of arguments and environment the kernel takes for a process:
// a quarter of its stack, but no less than 128 KiB and no more than 6 MiB; see execve(2).
func argumentSpace(pid uint32) uint64 {
	var stack unix.Rlimit
	if unix.Prlimit(int(pid), unix.RLIMIT_STACK, nil, &stack) != nil {
		return mostSpace
	}
	return min(max(stack.Cur/4, leastSpace), mostSpace)
}

// fits refuses a command line and an environment that the kernel would not take.
func fits(process *specs.Process, space uint64) error {
	longest := 32*os.Getpagesize() - 1 // of one of them, without its NUL
	var total uint64
	for what, list := range map[string][]string{"argument": process.Args, "environment variable": process.Env} {
		for _, text := range list {
			if len(text) > longest {
				return fmt.Errorf("%s %q… has %d bytes, the kernel takes %d: %w: %w", what, text[:20], len(text), longest, errdefs.ErrFailedPrecondition, unix.E2BIG)
			}
			total += uint64(len(text)) + 1 + strconv.IntSize/8
		}
	}
	if total > space {
		return fmt.Errorf("arguments and environment have %d bytes, the kernel takes %d: %w: %w", total, space, errdefs.ErrFailedPrecondition, unix.E2BIG)
	}
	return nil
}

// isOf says whether a process is in the control group of a container, and so on this
// machine's kernel.
func isOf(pid uint32, containerID string) bool {
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return err == nil && pid != 0 && strings.Contains(string(groups), containerID)
}

func openRoot(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

// find opens the program of a process as the OCI runtime looks for it; nil if there is none.
func find(root *os.File, process *specs.Process) (string, *os.File) {
	name := process.Args[0]
	var candidates []string
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			name = filepath.Join(process.Cwd, name)
		}
		candidates = []string{name}
	} else {
		for _, kv := range process.Env {
			if list, ok := strings.CutPrefix(kv, "PATH="); ok {
				candidates = nil
				for _, dir := range filepath.SplitList(list) {
					candidates = append(candidates, filepath.Join(dir, name))
				}
			}
		}
	}
	for _, path := range candidates {
		file, err := open(root, path)
		if err == nil {
			return path, file
		}
	}
	return "", nil
}

// open opens an executable regular file inside a root. Nothing else is opened, since a FIFO
// would block.
func open(root *os.File, path string) (*os.File, error) {
	fd, err := unix.Openat2(int(root.Fd()), path, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o111 == 0 {
		return nil, unix.EACCES
	}
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
}

// runnable says why the kernel would refuse a program.
func runnable(root, file *os.File, foreign bool) error {
	head := make([]byte, headSize)
	n, err := file.ReadAt(head, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil
	}
	head = head[:n]
	switch {
	case bytes.HasPrefix(head, []byte("#!")):
		return interpreter(root, "interpreter", interpreterOf(head))
	case bytes.HasPrefix(head, []byte("\x7fELF")):
		return elf(root, file, head, foreign)
	case foreign:
		return nil // a handler may know it
	default:
		return syscall.ENOEXEC
	}
}

// interpreterOf is the path in the first line of a script.
func interpreterOf(head []byte) string {
	line, _, whole := bytes.Cut(head[len("#!"):], []byte("\n"))
	if !whole && len(head) == headSize {
		return "" // cut off, perhaps in the middle of the path
	}
	if words := strings.Fields(string(line)); len(words) > 0 {
		return words[0]
	}
	return ""
}

func interpreter(root *os.File, what, path string) error {
	if !filepath.IsAbs(path) {
		return nil // relative to what, the kernel knows
	}
	file, err := open(root, path)
	if err == nil {
		return file.Close()
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%s %q: %w", what, path, err)
	}
	return nil
}

// Offsets and sizes in the header of a 64-bit ELF file and its program headers.
const (
	elfClass, elfData, elfMachine       = 4, 5, 18
	elfHeaders, elfHeaderSize, elfCount = 32, 54, 56
	elfHeaderLength                     = 64
	programType, programOffset          = 0, 8
	programFileSize, programLength      = 32, 56
	typeInterpreter                     = 3
	mostHeaders                         = 64
	class64, little                     = 2, 1
)

// elf checks machine and loader of a binary program.
func elf(root, file *os.File, head []byte, foreign bool) error {
	if len(head) < elfHeaderLength || head[elfData] != little {
		return nil
	}
	machine := binary.LittleEndian.Uint16(head[elfMachine:])
	if !native(machine) {
		if foreign {
			return nil
		}
		return fmt.Errorf("is for another machine (ELF type %d): %w", machine, syscall.ENOEXEC)
	}
	if head[elfClass] != class64 {
		return nil
	}
	at := binary.LittleEndian.Uint64(head[elfHeaders:])
	size := binary.LittleEndian.Uint16(head[elfHeaderSize:])
	count := binary.LittleEndian.Uint16(head[elfCount:])
	if size != programLength || count > mostHeaders {
		return nil
	}
	for i := range count {
		header := make([]byte, programLength)
		if _, err := file.ReadAt(header, int64(at)+int64(i)*programLength); err != nil {
			return nil //nolint:nilerr // the kernel judges it
		}
		if binary.LittleEndian.Uint32(header[programType:]) != typeInterpreter {
			continue
		}
		length := binary.LittleEndian.Uint64(header[programFileSize:])
		if length == 0 || length > unix.PathMax {
			return nil
		}
		path := make([]byte, length)
		if _, err := file.ReadAt(path, int64(binary.LittleEndian.Uint64(header[programOffset:]))); err != nil {
			return nil //nolint:nilerr // the kernel judges it
		}
		return interpreter(root, "loader", string(bytes.TrimRight(path, "\x00")))
	}
	return nil
}

// foreignFormats says whether the kernel has handlers for formats that are not its own.
func foreignFormats() bool {
	entries, err := os.ReadDir("/proc/sys/fs/binfmt_misc")
	if err != nil {
		return false
	}
	for _, e := range entries {
		if e.Name() != "register" && e.Name() != "status" {
			return true
		}
	}
	return false
}
