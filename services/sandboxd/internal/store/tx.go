package store

import (
	"encoding/binary"

	"go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
)

// Tx is a write transaction. It is valid only inside the function that Update was given.
type Tx struct {
	tx       *bbolt.Tx
	appended bool
}

// PutSandbox writes a sandbox record under its id.
func (t *Tx) PutSandbox(r *recordv1.Sandbox) error {
	return t.put(bucketSandboxes, r.GetId(), r)
}

// DeleteSandbox deletes a sandbox record; a missing one is not an error.
func (t *Tx) DeleteSandbox(id string) error {
	return t.tx.Bucket(bucketSandboxes).Delete([]byte(id))
}

// PutContainer writes a container record under its id.
func (t *Tx) PutContainer(r *recordv1.Container) error {
	return t.put(bucketContainers, r.GetId(), r)
}

// DeleteContainer deletes a container record; a missing one is not an error.
func (t *Tx) DeleteContainer(id string) error {
	return t.tx.Bucket(bucketContainers).Delete([]byte(id))
}

// PutRelease writes an owed network release under its sandbox id.
func (t *Tx) PutRelease(r *recordv1.NetworkRelease) error {
	return t.put(bucketReleases, r.GetSandboxId(), r)
}

// DeleteRelease deletes an owed network release; a missing one is not an error.
func (t *Tx) DeleteRelease(sandboxID string) error {
	return t.tx.Bucket(bucketReleases).Delete([]byte(sandboxID))
}

// AppendEvent adds an event at the end of the outbox.
func (t *Tx) AppendEvent(e *recordv1.Event) error {
	b := t.tx.Bucket(bucketOutbox)
	seq, err := b.NextSequence()
	if err != nil {
		return err
	}
	v, err := proto.Marshal(e)
	if err != nil {
		return err
	}
	t.appended = true
	return b.Put(binary.BigEndian.AppendUint64(nil, seq), v)
}

func (t *Tx) put(bucket []byte, key string, m proto.Message) error {
	v, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	return t.tx.Bucket(bucket).Put([]byte(key), v)
}
