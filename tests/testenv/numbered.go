package testenv

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

var errLog = errors.New("not what was written")

// numberLength is the width of the number that begins a line of a Numbered writer.
const numberLength = 9

// Numbered is a writer inside a container that writes lines with ascending numbers, so that
// a line that was lost, doubled or torn shows in the log.
type Numbered struct {
	// Name tells the files of several writers apart.
	Name string
	// Folder is a folder of the container in which the writer looks for the file "stop", and
	// leaves "<name>.lines", how many lines it wrote, and "<name>.slowest", the longest time
	// in seconds that it took to write a burst.
	Folder string
	// Burst is how many lines are written at a time.
	Burst int
	// Length is the bytes of a line with its end, at least 20.
	Length int
	// Pause is the time in seconds between bursts, as sleep takes it; empty for none.
	Pause string
}

// Script is the writer as a shell command. It ends after the burst in which the file "stop"
// appears, with status 0.
func (n Numbered) Script() string {
	pause := ""
	if n.Pause != "" {
		pause = fmt.Sprintf(`system("sleep %s")`, n.Pause)
	}
	return fmt.Sprintf(`awk 'function now() { getline uptime < "/proc/uptime"; close("/proc/uptime"); split(uptime, part, " "); return part[1] }
function asked() { found = (getline line < "%[2]s/stop") >= 0; close("%[2]s/stop"); return found }
BEGIN {
	pad = sprintf("%%0%[6]dd", 0)
	while (!asked()) {
		begun = now()
		for (i = 0; i < %[3]d; i++) printf "%%0%[4]dd%%s\n", count++, pad
		fflush()
		took = now() - begun
		if (took > slowest) slowest = took
		%[5]s
	}
	print count + 0 > "%[2]s/%[1]s.lines"
	print slowest + 0 > "%[2]s/%[1]s.slowest"
}'`, n.Name, n.Folder, n.Burst, numberLength, pause, n.Length-numberLength-1)
}

// Check reads what the writer wrote to a stream from logs in the form of the CRI, in the order
// of the files, and fails unless each of the lines is there once, in order and whole.
func (n Numbered) Check(stream string, lines int, paths ...string) error {
	next := 0
	part := ""
	for _, path := range paths {
		err := eachRecord(path, stream, func(tag, content string) error {
			part += content
			if tag == "P" {
				return nil
			}
			line := part
			part = ""
			number, err := strconv.Atoi(line[:min(numberLength, len(line))])
			if err != nil || len(line) != n.Length-1 || number != next {
				return fmt.Errorf("%s: line %d is %.40q of %d bytes: %w", path, next, line, len(line), errLog)
			}
			next++
			return nil
		})
		if err != nil {
			return err
		}
	}
	if next != lines || part != "" {
		return fmt.Errorf("%d lines and %d bytes of another, written were %d: %w", next, len(part), lines, errLog)
	}
	return nil
}

// eachRecord hands the records of a stream to use.
func eachRecord(path, stream string, use func(tag, content string) error) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	in := bufio.NewReaderSize(file, 1<<20)
	for {
		record, err := in.ReadString('\n')
		if errors.Is(err, io.EOF) && record == "" {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s: torn record %.80q: %w", path, record, err)
		}
		fields := strings.SplitN(strings.TrimSuffix(record, "\n"), " ", 4)
		if len(fields) != 4 || fields[2] != "F" && fields[2] != "P" {
			return fmt.Errorf("%s: record %.80q: %w", path, record, errLog)
		}
		if fields[1] != stream {
			continue
		}
		if err := use(fields[2], fields[3]); err != nil {
			return err
		}
	}
}
