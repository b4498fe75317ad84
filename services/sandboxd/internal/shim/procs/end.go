package procs

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// poll is the pause between two looks at processes that should end.
const poll = 10 * time.Millisecond

// Signal sends a signal to every process of a list once. One that has ended meanwhile is no error.
func Signal(list func() ([]int, error), sig unix.Signal) error {
	pids, err := list()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := unix.Kill(pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("signal process %d: %w", pid, err)
		}
	}
	return nil
}

// Kill sends SIGKILL to every process of a list until it is empty. before is called ahead of each
// time, to clear the way. When ctx ends first it returns those that are left, with the cause.
func Kill(ctx context.Context, list func() ([]int, error), before func()) (left []int, err error) {
	return end(ctx, list, func(pids []int) {
		before()
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL) // it may have ended
		}
	})
}

// end does something about the processes of a list until it is empty.
func end(ctx context.Context, list func() ([]int, error), do func(pids []int)) (left []int, err error) {
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		pids, err := list()
		if err != nil || len(pids) == 0 {
			return nil, err
		}
		do(pids)
		select {
		case <-ctx.Done():
			return pids, context.Cause(ctx)
		case <-tick.C:
		}
	}
}
