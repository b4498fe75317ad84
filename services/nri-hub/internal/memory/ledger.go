package memory

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub"
)

// compactAfter is the number of lines after which the ledger's file is written anew.
const compactAfter = 50_000

// maxLine is the longest line that is read back; what is longer is not written.
const maxLine = 1 << 20

var _ hub.Ledger = (*Ledger)(nil)

// Ledger is a file of lines that are only added. It survives a kill of the process, not
// one of the machine: after that, plugins start with nothing, too. A line that cannot be
// read is passed over.
type Ledger struct {
	path string
	log  *slog.Logger

	// mu guards all below; it is held while a line is written, which takes microseconds.
	mu    sync.Mutex
	file  *os.File
	lines int
	live  state
}

// state is what the lines add up to.
type state struct {
	objects map[string]line
	told    map[hub.ID]map[string]hub.Told
}

// line is one object, or how much of one a plugin was told.
type line struct {
	Object    string   `json:"o"`
	Pod       []byte   `json:"p,omitempty"`
	Container []byte   `json:"c,omitempty"`
	Plugin    *hub.ID  `json:"n,omitempty"`
	Told      hub.Told `json:"s,omitempty"`
}

// OpenLedger reads the file ledger.jsonl in folder, writes it anew without what has become
// pointless, and returns what it said.
func OpenLedger(folder string, log *slog.Logger) (*Ledger, hub.Past, error) {
	l := &Ledger{
		path: filepath.Join(folder, "ledger.jsonl"), log: log,
		live: state{objects: make(map[string]line), told: make(map[hub.ID]map[string]hub.Told)},
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, hub.Past{}, fmt.Errorf("run folder: %w", err)
	}
	data, err := os.ReadFile(l.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, hub.Past{}, fmt.Errorf("ledger: %w", err)
	}
	in := bufio.NewScanner(bytes.NewReader(data))
	in.Buffer(nil, 2*maxLine)
	for in.Scan() {
		var ln line
		if json.Unmarshal(in.Bytes(), &ln) == nil {
			l.live.add(ln)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.compact(); err != nil {
		return nil, hub.Past{}, err
	}
	return l, l.live.past(), nil
}

func (s *state) add(ln line) {
	if ln.Plugin == nil {
		s.objects[ln.Object] = ln
		return
	}
	if s.told[*ln.Plugin] == nil {
		s.told[*ln.Plugin] = make(map[string]hub.Told)
	}
	if ln.Told == hub.ToldRemoved {
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

func (s *state) past() hub.Past {
	past := hub.Past{
		Pods: make(map[string]*nri.PodSandbox), Containers: make(map[string]*nri.Container),
		Told: make(map[hub.ID]map[string]hub.Told),
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

// compact writes the file anew. The caller holds mu.
func (l *Ledger) compact() error {
	l.live.prune()
	var buf bytes.Buffer
	n := 0
	for _, ln := range l.live.objects {
		n += appendLine(&buf, ln)
	}
	for id, told := range l.live.told {
		for o, t := range told {
			n += appendLine(&buf, line{Object: o, Plugin: &id, Told: t})
		}
	}
	temp := l.path + ".new"
	if err := os.WriteFile(temp, buf.Bytes(), 0o600); err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	if err := os.Rename(temp, l.path); err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	if l.file != nil {
		_ = l.file.Close() // replaced; everything in it is in the new one
	}
	l.file, l.lines = f, n
	return nil
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

// Object implements hub.Ledger.
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

// Told implements hub.Ledger.
func (l *Ledger) Told(plugin hub.ID, object string, told hub.Told) {
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
	_, err := l.file.Write(buf.Bytes())
	if l.lines++; err == nil && l.lines > compactAfter && l.lines > 4*l.live.size() {
		err = l.compact()
	}
	if err != nil {
		l.log.Warn("what plugins were told is not remembered", slog.Any("error", err))
	}
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
	err := l.file.Close()
	l.file = nil
	return err
}
