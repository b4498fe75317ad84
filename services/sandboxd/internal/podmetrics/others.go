package podmetrics

import (
	"maps"
	"slices"
	"strconv"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func blockDevices() []metric {
	of := func(name, help, operation string, counts func(Device) map[string]uint64) metric {
		return metric{
			name: name, help: help, kind: criv1.MetricType_COUNTER, labels: []string{"device"},
			points: func(s Sample) []point {
				return eachDevice(s, func(d Device, name string) []point {
					return []point{{labels: []string{name}, value: counts(d)[operation]}}
				})
			},
		}
	}
	bytes := func(d Device) map[string]uint64 { return d.Bytes }
	ios := func(d Device) map[string]uint64 { return d.IOs }
	return []metric{
		of("container_fs_reads_bytes_total", "Bytes read from block devices.", "Read", bytes),
		of("container_fs_reads_total", "Reads from block devices.", "Read", ios),
		of("container_fs_writes_bytes_total", "Bytes written to block devices.", "Write", bytes),
		of("container_fs_writes_total", "Writes to block devices.", "Write", ios),
		{
			name: "container_blkio_device_usage_total", help: "Bytes moved from and to block devices, by operation.",
			kind: criv1.MetricType_COUNTER, labels: []string{"device", "major", "minor", "operation"}, points: blkio,
		},
	}
}

func eachDevice(s Sample, points func(d Device, name string) []point) []point {
	if s.Cgroup == nil {
		return nil
	}
	var out []point
	for _, d := range s.Cgroup.Devices {
		out = append(out, points(d, s.DeviceName(d.Major, d.Minor))...)
	}
	return out
}

func blkio(s Sample) []point {
	return eachDevice(s, func(d Device, name string) []point {
		var out []point
		for _, operation := range slices.Sorted(maps.Keys(d.Bytes)) {
			out = append(out, point{
				labels: []string{name, strconv.FormatUint(d.Major, 10), strconv.FormatUint(d.Minor, 10), operation},
				value:  d.Bytes[operation],
			})
		}
		return out
	})
}

func filesystem() []metric {
	of := func(name, help string, value func(*Layer) uint64) metric {
		return metric{
			name: name, help: help, kind: criv1.MetricType_GAUGE, labels: []string{"device"},
			points: func(s Sample) []point {
				if s.Layer == nil {
					return nil
				}
				return []point{{labels: []string{s.Layer.Filesystem.Device}, value: value(s.Layer), at: s.Layer.At}}
			},
		}
	}
	return []metric{
		of("container_fs_usage_bytes", "Bytes of the writable layer.", func(l *Layer) uint64 { return l.Used }),
		of("container_fs_limit_bytes", "Size of the file system of the writable layer, in bytes.",
			func(l *Layer) uint64 { return l.Filesystem.Bytes }),
		of("container_fs_inodes_total", "Inodes of the file system of the writable layer.",
			func(l *Layer) uint64 { return l.Filesystem.Inodes }),
		of("container_fs_inodes_free", "Free inodes of the file system of the writable layer.",
			func(l *Layer) uint64 { return l.Filesystem.InodesFree }),
	}
}

func network() []metric {
	of := func(name, help string, value func(Interface) uint64) metric {
		return metric{
			name: name, help: help, kind: criv1.MetricType_COUNTER, labels: []string{"interface"},
			points: func(s Sample) []point {
				var out []point
				for _, i := range s.Interfaces {
					out = append(out, point{labels: []string{i.Name}, value: value(i)})
				}
				return out
			},
		}
	}
	return []metric{
		of("container_network_receive_bytes_total", "Bytes received.", func(i Interface) uint64 { return i.Received.Bytes }),
		of("container_network_receive_packets_total", "Packets received.", func(i Interface) uint64 { return i.Received.Packets }),
		of("container_network_receive_packets_dropped_total", "Packets dropped while receiving.",
			func(i Interface) uint64 { return i.Received.Dropped }),
		of("container_network_receive_errors_total", "Errors while receiving.", func(i Interface) uint64 { return i.Received.Errors }),
		of("container_network_transmit_bytes_total", "Bytes sent.", func(i Interface) uint64 { return i.Sent.Bytes }),
		of("container_network_transmit_packets_total", "Packets sent.", func(i Interface) uint64 { return i.Sent.Packets }),
		of("container_network_transmit_packets_dropped_total", "Packets dropped while sending.",
			func(i Interface) uint64 { return i.Sent.Dropped }),
		of("container_network_transmit_errors_total", "Errors while sending.", func(i Interface) uint64 { return i.Sent.Errors }),
	}
}

func processes() []metric {
	of := func(name, help string, value func(*Processes) uint64) metric {
		return metric{name: name, help: help, kind: criv1.MetricType_GAUGE, points: func(s Sample) []point {
			if s.Processes == nil {
				return nil
			}
			return []point{{value: value(s.Processes)}}
		}}
	}
	return []metric{
		of("container_processes", "Processes that run.", func(p *Processes) uint64 { return p.Count }),
		of("container_file_descriptors", "Open file descriptors.", func(p *Processes) uint64 { return p.FileDescriptors }),
		of("container_sockets", "Open sockets.", func(p *Processes) uint64 { return p.Sockets }),
		gauge("container_threads", "Threads that run.", func(f *Figures) uint64 { return f.Tasks }),
		gauge("container_threads_max", "Most threads that may run; 0 for no limit.", func(f *Figures) uint64 { return f.TasksMax }),
		{
			name: "container_tasks_state", help: "Threads by what they do.",
			kind: criv1.MetricType_GAUGE, labels: []string{"state"}, points: taskStates,
		},
		{
			name: "container_ulimits_soft", help: "Soft limits of the first process.",
			kind: criv1.MetricType_GAUGE, labels: []string{"ulimit"},
			points: func(s Sample) []point {
				if s.Processes == nil || s.Processes.OpenFilesLimit == 0 {
					return nil
				}
				return []point{{labels: []string{"max_open_files"}, value: s.Processes.OpenFilesLimit}}
			},
		},
	}
}

func taskStates(s Sample) []point {
	if s.Processes == nil {
		return nil
	}
	return []point{
		{labels: []string{"sleeping"}, value: s.Processes.Sleeping},
		{labels: []string{"running"}, value: s.Processes.Running},
		{labels: []string{"stopped"}, value: s.Processes.Stopped},
		{labels: []string{"uninterruptible"}, value: s.Processes.Uninterruptible},
	}
}

func lifetime() []metric {
	of := func(name, help string, at func(Sample) time.Time) metric {
		return metric{name: name, help: help, kind: criv1.MetricType_GAUGE, points: func(s Sample) []point {
			if at(s).IsZero() {
				return nil
			}
			return []point{{value: uint64(max(at(s).Unix(), 0))}}
		}}
	}
	return []metric{
		of("container_start_time_seconds", "When it was started, in seconds since 1970.", func(s Sample) time.Time { return s.Started }),
		of("container_last_seen", "When it was last measured, in seconds since 1970.", func(s Sample) time.Time { return s.Now }),
	}
}
