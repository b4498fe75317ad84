package network

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"
)

// Folder is a folder of network configurations, the first MaxConfNum of which, by file name,
// are used; 0 means all.
type Folder struct {
	ConfDir    string
	MaxConfNum int
}

// Handlers are the runtime handlers whose pods have networks of their own.
type Handlers struct {
	// ByName has the folders of those that have one; the others have the node's.
	ByName map[string]Folder
	// Default is the handler by whose networks the node is ready or not.
	Default string
}

// folder is what is known of a folder. The lock of [CNI] guards it.
type folder struct {
	Folder

	networks []network
	// loadErr says what is wrong with the configuration, status what its plugins say; nil
	// for nothing.
	loadErr, status error
	// wellAt is when the plugins of the present networks were well last; zero for never.
	wellAt time.Time
}

// ready says whether pods can be attached, and why not.
func (f *folder) ready() error { return cmp.Or(f.loadErr, f.status) }

// take makes what was read the folder's networks and says whether they are others than before.
// A wrong configuration makes the network not ready, but the last good one stays in use for
// pods that come meanwhile; an empty folder ends its use.
func (f *folder) take(networks []network, err error) bool {
	f.loadErr = err
	if err != nil && !errors.Is(err, errNoNetwork) {
		return false
	}
	if slices.EqualFunc(networks, f.networks, network.equal) {
		return false
	}
	f.networks, f.status, f.wellAt = networks, unasked(networks), time.Time{}
	return true
}

// Configure brings other networks of runtime handlers into force for pods to come.
func (c *CNI) Configure(handlers Handlers) {
	c.mu.Lock()
	c.handlers = handlers
	next := map[Folder]*folder{}
	for _, want := range append(slices.Collect(maps.Values(handlers.ByName)), c.node) {
		next[want] = cmp.Or(c.folders[want], &folder{Folder: want})
	}
	c.folders = next
	c.mu.Unlock()
	c.reload()
	select {
	case c.again <- struct{}{}: // the new ones are watched, and their plugins asked
	default:
	}
}

// folderOf is the folder of a runtime handler. The lock must be held.
func (c *CNI) folderOf(handler string) *folder {
	if own, ok := c.handlers.ByName[handler]; ok {
		return c.folders[own]
	}
	return c.folders[c.node]
}

// all are the folders in a fixed order.
func (c *CNI) all() []Folder {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.SortedFunc(maps.Keys(c.folders), func(a, b Folder) int {
		return cmp.Or(cmp.Compare(a.ConfDir, b.ConfDir), cmp.Compare(a.MaxConfNum, b.MaxConfNum))
	})
}

// Ready says whether the networks of the default handler are usable: configured, with plugins
// that can take pods, and why not.
func (c *CNI) Ready() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.folderOf(c.handlers.Default).ready()
}

// allReady says whether the networks of all handlers are usable.
func (c *CNI) allReady() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range c.folders {
		if f.ready() != nil {
			return false
		}
	}
	return true
}

// readiness is what keeps one folder from being ready. One that is used no more is ready.
func (c *CNI) readiness(of Folder) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f, ok := c.folders[of]; ok {
		return f.ready()
	}
	return nil
}

// current are the networks of pods of a runtime handler.
func (c *CNI) current(handler string) ([]network, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.folderOf(handler)
	if len(f.networks) == 0 {
		return nil, f.loadErr
	}
	return f.networks, nil
}

// networksIn are the networks of one folder.
func (c *CNI) networksIn(of Folder) []network {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f, ok := c.folders[of]; ok {
		return f.networks
	}
	return nil
}

// everywhere are the networks of all handlers, each once.
func (c *CNI) everywhere() []network {
	var out []network
	for _, f := range c.all() {
		for _, n := range c.networksIn(f) {
			if !slices.ContainsFunc(out, n.equal) {
				out = append(out, n)
			}
		}
	}
	return out
}

// reload reads the configurations anew.
func (c *CNI) reload() {
	other := false
	for _, of := range c.all() {
		networks, err := load(of.ConfDir, of.MaxConfNum)
		c.mu.Lock()
		if f, ok := c.folders[of]; ok && f.take(networks, err) {
			other = true
		}
		c.mu.Unlock()
	}
	if !other {
		return
	}
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// askStatus asks plugins that know the STATUS command whether they can take pods. What they
// said before holds until all of a folder have answered; folders do not wait for each other.
func (c *CNI) askStatus(ctx context.Context) {
	var wg sync.WaitGroup
	for _, of := range c.all() {
		wg.Go(func() { c.askFolder(ctx, of) })
	}
	wg.Wait()
}

func (n network) equal(other network) bool {
	return n.IfName == other.IfName && bytes.Equal(n.List.Bytes, other.List.Bytes)
}
