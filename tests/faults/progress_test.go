//go:build integration

package faults

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// step is one event about a pull, as an operator sees it.
type step struct {
	PullID         string `json:"pull_id"`
	Image          string `json:"image"`
	State          string `json:"state"`
	BytesDone      string `json:"bytes_done"`
	BytesTotal     string `json:"bytes_total"`
	LayersFetched  int    `json:"layers_fetched"`
	LayersUnpacked int    `json:"layers_unpacked"`
	LayersTotal    int    `json:"layers_total"`
	ImageID        string `json:"image_id"`
	Error          string `json:"error"`
}

func (p step) done(t *testing.T) (done, total int) {
	t.Helper()
	done, err := strconv.Atoi(p.BytesDone)
	must(t, err)
	total, err = strconv.Atoi(p.BytesTotal)
	must(t, err)
	return done, total
}

// steps follows the events about pulls on the bus.
type steps struct {
	t   *testing.T
	mu  sync.Mutex
	out bytes.Buffer // mu guards out
}

// Write takes what the program prints.
func (f *steps) Write(data []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.out.Write(data)
}

// of gives the events about an image so far.
func (f *steps) of(image string) (all []step) {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for line := range strings.Lines(f.out.String()) {
		if !strings.HasSuffix(line, "\n") {
			break // the rest is on its way
		}
		var event struct {
			Topic string `json:"topic"`
			Event step   `json:"event"`
		}
		if err := json.Unmarshal([]byte(line), &event); err != nil {
			f.t.Fatalf("%q: %v", line, err)
		}
		if event.Event.Image == image {
			all = append(all, event.Event)
		}
	}
	return all
}

// wait waits for an event about an image.
func (f *steps) wait(image, what string, wanted func(step) bool) {
	f.t.Helper()
	eventually(f.t, patience, what, func() error {
		all := f.of(image)
		if slices.ContainsFunc(all, wanted) {
			return nil
		}
		return fmt.Errorf("events so far: %+v", all)
	})
}

// Who listens on the bus sees how far a pull is: its beginning, some of the way however many
// pieces come in, and its end, good or bad.
func TestProgressOfPullsIsOnTheBus(t *testing.T) {
	s, reg := withBadRegistry(t, testenv.Setup{})
	followed := &steps{t: t}
	tail, err := s.EventBus(t.Context(), "tail", "--json", "--all", "--topic", "images.progress", "--config", s.ConfigFile(testenv.EventBus))
	must(t, err)
	tail.Stdout = followed
	must(t, tail.Start())
	defer func() {
		_ = tail.Process.Kill()
		_ = tail.Wait()
	}()

	big := noise(t, "big", 6<<20)
	image := onBusybox(t, layer(t, item{name: "a", body: "a"}), layer(t, item{name: "b", body: "b"}), big)
	ref := reg.add("app:1", image)
	layers, err := image.Layers()
	must(t, err)
	goOn := make(chan struct{})
	reg.bend(on(digestOf(t, big), func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		body := whole(r, next).Body.Bytes()
		w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		// Many pieces, each of which moves the pull.
		half := len(body) / 2
		for at := 0; at < half; at += 16 << 10 {
			_, _ = w.Write(body[at:min(at+16<<10, half)])
			_ = http.NewResponseController(w).Flush()
			time.Sleep(5 * time.Millisecond)
		}
		select {
		case <-goOn:
		case <-r.Context().Done():
		}
		_, _ = w.Write(body[half:])
	}))
	begun := time.Now()
	pulled := make(chan error, 1)
	id := ""
	go func() {
		var err error
		id, err = s.tryPull(ref, nil)
		pulled <- err
	}()
	followed.wait(ref, "the pull is half way", func(p step) bool {
		done, total := p.done(t)
		return p.State == "PULL_STATE_RUNNING" && done > total/4 && done < total && p.LayersFetched == len(layers)-1 && p.LayersUnpacked == len(layers)-1
	})
	close(goOn)
	must(t, <-pulled)
	followed.wait(ref, "the pull is done", func(p step) bool { return p.State == "PULL_STATE_DONE" })
	took := time.Since(begun)
	all := followed.of(ref)
	before := 0
	for i, p := range all {
		done, total := p.done(t)
		if p.PullID != all[0].PullID || p.LayersTotal != len(layers) || total == 0 || done < before || done > total {
			t.Errorf("event %d is %+v after %d bytes", i, p, before)
		}
		before = done
	}
	last := all[len(all)-1]
	if done, total := last.done(t); last.State != "PULL_STATE_DONE" || done != total || last.LayersUnpacked != len(layers) || !strings.HasSuffix(id, last.ImageID) || last.ImageID == "" {
		t.Errorf("the last event is %+v, the image %s", last, id)
	}
	// At most one in two seconds, beside the first and the last.
	if most := int(took/(2*time.Second)) + 3; len(all) > most {
		t.Errorf("%d events in %s, want at most %d", len(all), took, most)
	}

	bad := reg.add("bad:1", onBusybox(t, noise(t, "bad", 1<<20)))
	reg.bend(on("/blobs/", rewrite(func(body []byte) []byte {
		body[len(body)/2] ^= 0xff
		return body
	})))
	if _, err := s.tryPull(bad, nil); err == nil {
		t.Error("wrong bytes were pulled")
	}
	missing := reg.Addr() + "/missing:1"
	if _, err := s.tryPull(missing, nil); err == nil {
		t.Error("a missing image was pulled")
	}
	for _, image := range []string{bad, missing} {
		followed.wait(image, "the failed pull is told of", func(p step) bool { return p.State == "PULL_STATE_FAILED" && p.Error != "" })
		if all := followed.of(image); all[len(all)-1].State != "PULL_STATE_FAILED" {
			t.Errorf("the last event of a failed pull is %+v", all[len(all)-1])
		}
	}
}
