package podmetrics

import criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

// Figures are the readings of a cgroup in the same form for both versions. Times are in
// nanoseconds, sizes in bytes. A limit is 0 if there is none. What this kernel does not
// count is 0 or nil.
type Figures struct {
	// Group is the path of the cgroup below the root of its hierarchy.
	Group string

	// CPU is the time used, of which User and System are parts.
	CPU, User, System uint64
	// Periods of enforcement have elapsed, of which Throttled held the group back, for
	// ThrottledTime in all.
	Periods, Throttled, ThrottledTime uint64
	// Bursts are the periods in which more than the quota was used, BurstTime by how much.
	Bursts, BurstTime uint64
	// Shares, Quota and Period are the settings of the scheduler, in the terms of version 1;
	// a Quota of 0 is none.
	Shares, Quota, Period uint64

	// Memory is what is charged to the group, MaxMemory the most that ever was.
	Memory, MaxMemory              uint64
	Cache, RSS, MappedFile, Kernel uint64
	ActiveFile, InactiveFile       uint64
	MemoryLimit, MemoryReservation uint64
	MemoryFailures, OOMKills       uint64
	Own, Hierarchy                 Faults
	Swap, SwapLimit                uint64
	SwapCounted, SwapLimited       bool
	HugePages                      []HugePages
	CPUPSI, MemoryPSI, IOPSI       *criv1.PsiStats
	// Tasks are the threads of the group and all below it, of at most TasksMax.
	Tasks, TasksMax uint64
	// Devices are the block devices that the group used.
	Devices []Device
}

// Faults are page faults.
type Faults struct{ Minor, Major uint64 }

// HugePages is the use of huge pages of one size, such as "2MB". Max is there for
// version 1 only.
type HugePages struct {
	Size       string
	Usage, Max uint64
	MaxKnown   bool
}

// Device is the use of a block device: bytes and operations by kind of operation, in the
// kernel's words ("Read", "Write", "Discard", and more for version 1).
type Device struct {
	Major, Minor uint64
	Bytes, IOs   map[string]uint64
}

// Interface is the traffic of a network interface since it was made.
type Interface struct {
	Name           string
	Received, Sent Traffic
}

// Traffic counts one direction.
type Traffic struct{ Bytes, Packets, Errors, Dropped uint64 }

// Processes is what the processes of a cgroup have open.
type Processes struct {
	// Count is the number of processes.
	Count uint64
	// FileDescriptors that are open, of which Sockets are sockets.
	FileDescriptors, Sockets uint64
	// OpenFilesLimit is the soft limit of the first process; 0 if it is gone.
	OpenFilesLimit uint64
	// Threads by what they do.
	Running, Sleeping, Stopped, Uninterruptible uint64
}

// Filesystem is a file system as a whole.
type Filesystem struct {
	// Device is what is mounted, such as "/dev/sda1"; for file systems without a device
	// it is their name.
	Device string
	// Bytes and Inodes are its size, InodesFree what is left of it.
	Bytes, Inodes, InodesFree uint64
}

// WorkingSet is the memory that cannot be taken back without pain.
func (f *Figures) WorkingSet() uint64 { return f.Memory - min(f.Memory, f.InactiveFile) }
