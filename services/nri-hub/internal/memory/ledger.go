package memory

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// compactAfter is the number of lines after which the ledger's file is written anew.
const compactAfter = 50_000

// maxLine is the longest line that is read back; what is longer is not written.
const maxLine = 1 << 20

var _ object.Ledger = (*Ledger)(nil)

// syncPause is from the first note to its write to the disk, which brings all that is noted
// meanwhile, and is not in the way of the call that the note is about.
const syncPause = 50 * time.Millisecond

// Ledger is a file of lines that are only added. It survives a kill of the process at once,
// and one of the machine from a moment later on (Run): nobody waits for the disk, and an end
// that is lost in that moment is that of an object about which its plugin learns the rest from
// its synchronisation. A line that cannot be read is passed over.
type Ledger struct {
	path  string
	log   *slog.Logger
	dirty chan struct{} // of capacity one; there is something for the disk

	// mu guards all below; it is held while a line is written, which takes microseconds.
	mu    sync.Mutex
	file  *os.File
	lines int
	live  state
	// since has what is written while the file is made anew; nil at all other times.
	since *bytes.Buffer
}

// state is what the lines add up to.
type state struct {
	objects map[string]line
	told    map[plug.ID]map[string]object.Stage
}

// line is one object, or how much of one a plugin was told.
type line struct {
	Object    string       `json:"o"`
	Pod       []byte       `json:"p,omitempty"`
	Container []byte       `json:"c,omitempty"`
	Plugin    *plug.ID     `json:"n,omitempty"`
	Told      object.Stage `json:"s,omitempty"`
}

// OpenLedger reads the file ledger.jsonl in folder, writes it anew without what has become
// pointless, and returns what it said.
func OpenLedger(folder string, log *slog.Logger) (*Ledger, object.Past, error) {
	l := &Ledger{
		path: filepath.Join(folder, "ledger.jsonl"), log: log, dirty: make(chan struct{}, 1),
		live: state{objects: make(map[string]line), told: make(map[plug.ID]map[string]object.Stage)},
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, object.Past{}, fmt.Errorf("state folder: %w", err)
	}
	data, err := os.ReadFile(l.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, object.Past{}, fmt.Errorf("ledger: %w", err)
	}
	in := bufio.NewScanner(bytes.NewReader(data))
	in.Buffer(nil, 2*maxLine)
	for in.Scan() {
		var ln line
		if json.Unmarshal(in.Bytes(), &ln) == nil {
			l.live.add(ln)
		}
	}
	if err := l.compact(); err != nil {
		return nil, object.Past{}, err
	}
	return l, l.live.past(), nil
}

func (s *state) add(ln line) {
	if ln.Plugin == nil {
		s.objects[ln.Object] = ln
		return
	}
	if s.told[*ln.Plugin] == nil {
		s.told[*ln.Plugin] = make(map[string]object.Stage)
	}
	if ln.Told == object.Removed {
		delete(s.told[*ln.Plugin], ln.Object)
		return
	}
	s.told[*ln.Plugin][ln.Object] = ln.Told
}

// prune drops objects that no plugin has to hear of any more.
func (s *state) prune() {
	wanted := make(map[string]bool)
	for id, told := range s.told {
		if len(told) == 0 {
			delete(s.told, id)
		}
		for o := range told {
			wanted[o] = true
		}
	}
	for id := range s.objects {
		if !wanted[id] {
			delete(s.objects, id)
		}
	}
}

func (s *state) past() object.Past {
	past := object.Past{
		Pods: make(map[string]*nri.PodSandbox), Containers: make(map[string]*nri.Container),
		Told: make(map[plug.ID]map[string]object.Stage),
	}
	for id, ln := range s.objects {
		var pod nri.PodSandbox
		var container nri.Container
		if proto.Unmarshal(ln.Pod, &pod) != nil || proto.Unmarshal(ln.Container, &container) != nil {
			continue
		}
		if _, ok := past.Pods[pod.GetId()]; !ok {
			past.Pods[pod.GetId()] = &pod
		}
		if len(ln.Container) > 0 {
			past.Containers[id] = &container
		}
	}
	for id, told := range s.told {
		past.Told[id] = maps.Clone(told)
	}
	return past
}

// compact writes the file anew without what has become pointless. It holds no lock while it
// waits for the disk; it must not be called concurrently.
func (l *Ledger) compact() error {
	l.mu.Lock()
	content, lines := l.live.render()
	l.since = new(bytes.Buffer)
	l.mu.Unlock()
	f, err := os.OpenFile(l.path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err == nil {
		if _, err = f.Write(content); err == nil {
			err = f.Sync()
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	since := l.since
	l.since = nil
	if err == nil {
		_, err = f.Write(since.Bytes())
	}
	if err == nil {
		err = os.Rename(l.path+".new", l.path)
	}
	if err != nil {
		if f != nil {
			_ = f.Close()
		}
		return fmt.Errorf("ledger: %w", err)
	}
	if l.file != nil {
		_ = l.file.Close() // everything in it is in the new one
	}
	l.file, l.lines = f, lines
	l.stain()
	return nil
}

// render gives all that matters as lines, and their number.
func (s *state) render() ([]byte, int) {
	s.prune()
	var buf bytes.Buffer
	n := 0
	for _, ln := range s.objects {
		n += appendLine(&buf, ln)
	}
	for id, told := range s.told {
		for o, t := range told {
			n += appendLine(&buf, line{Object: o, Plugin: &id, Told: t})
		}
	}
	return buf.Bytes(), n
}

// stain says that there is something for the disk.
func (l *Ledger) stain() {
	select {
	case l.dirty <- struct{}{}:
	default:
	}
}

// Run brings what is noted to the disk until ctx ends, many lines at a time, and keeps the file
// from growing.
func (l *Ledger) Run(ctx context.Context) {
	pause := time.NewTimer(syncPause)
	defer pause.Stop()
	for {
		select {
		case <-l.dirty:
			pause.Reset(syncPause)
		case <-ctx.Done():
			return
		}
		select {
		case <-pause.C:
			l.sync()
		case <-ctx.Done():
			return
		}
	}
}

// sync writes to the disk with no lock held.
func (l *Ledger) sync() {
	l.mu.Lock()
	f, grown := l.file, l.lines > compactAfter && l.lines > 4*l.live.size()
	l.mu.Unlock()
	if f == nil {
		return
	}
	err := f.Sync()
	if err == nil && grown {
		err = l.compact()
	}
	if err != nil {
		l.log.Warn("what plugins were told is not on the disk", slog.Any("error", err))
	}
}

func appendLine(buf *bytes.Buffer, ln line) int {
	text, err := json.Marshal(ln)
	if err != nil || len(text) > maxLine {
		return 0
	}
	buf.Write(text)
	buf.WriteByte('\n')
	return 1
}

// Object implements object.Ledger.
func (l *Ledger) Object(pod *nri.PodSandbox, container *nri.Container) {
	ln := line{Object: pod.GetId()}
	var err error
	if ln.Pod, err = proto.Marshal(pod); err != nil {
		return
	}
	if container != nil {
		ln.Object = container.GetId()
		if ln.Container, err = proto.Marshal(container); err != nil {
			return
		}
	}
	l.write(ln)
}

// Told implements object.Ledger.
func (l *Ledger) Told(plugin plug.ID, object string, told object.Stage) {
	l.write(line{Object: object, Plugin: &plugin, Told: told})
}

func (l *Ledger) write(ln line) {
	var buf bytes.Buffer
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil || appendLine(&buf, ln) == 0 {
		return
	}
	l.live.add(ln)
	l.lines++
	if l.since != nil {
		l.since.Write(buf.Bytes())
	}
	if _, err := l.file.Write(buf.Bytes()); err != nil {
		l.log.Warn("what plugins were told is not remembered", slog.Any("error", err))
	}
	l.stain()
}

func (s *state) size() int {
	n := len(s.objects)
	for _, told := range s.told {
		n += len(told)
	}
	return n
}

// Close closes the file. What comes later is not remembered.
func (l *Ledger) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return nil
	}
	err := errors.Join(l.file.Sync(), l.file.Close())
	l.file = nil
	return err
}
