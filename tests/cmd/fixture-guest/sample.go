package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"time"
)

// sample prints one line per second. It ends with status 0 after -seconds (0:
// never) or as soon as it is told to stop, and says so in its last line.
func sample(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("sample", flag.ContinueOnError)
	seconds := flags.Int("seconds", 0, "end after so many seconds; 0 means when told to")
	greeting := flags.String("greeting", "hello from the sample pod", "what each line says")
	if err := flags.Parse(args); err != nil {
		return err
	}
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for n := 1; ; n++ {
		if _, err := fmt.Fprintf(out, "%s: %s, line %d\n", host, *greeting, n); err != nil {
			return err
		}
		if n == *seconds {
			_, err := fmt.Fprintf(out, "%s: done after %d seconds\n", host, n)
			return err
		}
		select {
		case <-ctx.Done():
			_, err := fmt.Fprintf(out, "%s: told to stop\n", host)
			return err
		case <-tick.C:
		}
	}
}
