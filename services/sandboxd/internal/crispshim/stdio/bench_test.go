package stdio

import (
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crilog"
)

// BenchmarkLog is what it costs to write the output of a busy process into its log: the
// processor time of the shim's part alone, and the rate that both together reach.
func BenchmarkLog(b *testing.B) {
	for _, length := range []int{80, 1000} {
		b.Run(strconv.Itoa(length)+" bytes a line", func(b *testing.B) {
			const megabytes = 64
			dir := b.TempDir()
			var used, took time.Duration
			for b.Loop() {
				path := filepath.Join(dir, "log")
				s, err := Open(b.Context(), Config{
					ID: "c", Stdout: LogName(crilog.Place{Path: path}, 0), Stderr: LogName(crilog.Place{Path: path}, 0),
				}, slog.New(slog.DiscardHandler))
				if err != nil {
					b.Fatal(err)
				}
				cmd := exec.CommandContext(b.Context(), "awk",
					`BEGIN { pad = sprintf("%0`+strconv.Itoa(length-1)+`d", 0); for (i = 0; i < `+strconv.Itoa(megabytes*1_000_000/length)+`; i++) print pad }`)
				s.Set(cmd)
				before, begun := processorTime(b), time.Now()
				if err := cmd.Start(); err != nil {
					b.Fatal(err)
				}
				if err := s.Run(nil); err != nil {
					b.Fatal(err)
				}
				if err := cmd.Wait(); err != nil {
					b.Fatal(err)
				}
				if err := s.Wait(b.Context()); err != nil {
					b.Fatal(err)
				}
				used, took = used+processorTime(b)-before, took+time.Since(begun)
				if err := s.Close(); err != nil {
					b.Fatal(err)
				}
				if err := os.Remove(path); err != nil {
					b.Fatal(err)
				}
			}
			total := float64(megabytes * b.N)
			b.ReportMetric(used.Seconds()*1000/total, "cpu-ms/MB")
			b.ReportMetric(total/took.Seconds(), "MB/s")
		})
	}
}

// processorTime is what this process has used so far.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
