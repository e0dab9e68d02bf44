package publish

import (
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
)

// Options are the optional fields of an event. They are jetstream.PublishOptions, whose fields say
// what they are for.
type Options struct {
	ID                string
	TS                int64
	HasTS             bool
	Key               string
	SID               string
	Headers           map[string]string
	Tags              []string
	CausedBy          []string
	Tombstone         bool
	Delay             time.Duration
	At                time.Time
	Wrapper           bool
	Brief             bool
	CountFor          string
	ExpectKeySequence *uint64
	Yield             bool
	KeyExists         bool
}

// fields are what native clients may say of an event, too.
func (o *Options) fields() native.Fields {
	return native.Fields{
		ID: o.ID, TS: o.TS, HasTS: o.HasTS, Key: o.Key, SID: o.SID, Headers: o.Headers, Tags: o.Tags, CausedBy: o.CausedBy, Tombstone: o.Tombstone,
	}
}

// Validate checks the options as a publish would, apart from what the topic requires. It returns a
// bad_options *Error or nil.
func (o *Options) Validate() error {
	if o.ExpectKeySequence != nil && o.Key == "" {
		return event.BadOptions("an expected key sequence needs a key")
	}
	if o.Tombstone && o.Key == "" {
		return event.BadOptions("opts.tombstone removes a key: give opts.key")
	}
	f := o.fields()
	if err := f.Check(); err != nil {
		return event.BadOptions("opts.%v", err)
	}
	return nil
}

// due returns when the event is to be stored, and false if that is now.
func (o *Options) due(now time.Time) (time.Time, bool) {
	at := o.At
	if o.Delay != 0 {
		at = now.Add(o.Delay)
	}
	if !at.After(now) {
		return time.Time{}, false
	}
	// the server knows milliseconds, and no event is early
	return at.Add(time.Millisecond - 1).Truncate(time.Millisecond), true
}

// Delayed reports whether Delay or At is set. Such a publish may wait for the event store before it
// is sent.
func (o *Options) Delayed() bool { return o.Delay != 0 || !o.At.IsZero() }

// validateDelay checks Delay and At.
func (o *Options) validateDelay(now time.Time, most time.Duration) error {
	switch {
	case o.Delay != 0 && !o.At.IsZero():
		return event.BadOptions("opts.delay_ms and opts.at are two ways to say when: give one")
	case o.Delay < 0:
		return event.BadOptions("opts.delay_ms must not be negative")
	case o.Delay > most:
		return event.BadOptions("opts.delay_ms is %d, at most %d are allowed (max_delay)", o.Delay.Milliseconds(), most.Milliseconds())
	case o.At.Sub(now) > most:
		return event.BadOptions("opts.at is more than %d ms ahead, which is the most allowed (max_delay)", most.Milliseconds())
	case o.ExpectKeySequence != nil:
		return event.BadOptions("an expected key sequence and a delay exclude each other")
	}
	return nil
}

// outgoing is an event that is being published, and what its topic adds to what the caller gave.
type outgoing struct {
	Options

	payload []byte
	bytes   int64 // in the store, once it was admitted
	version int   // of the schema, which the hub stamps the event with; 0: none
	// broken says that the event breaks the schema of a topic that this hub meets with it.
	broken bool
	// original is the header of a dead letter that says where its event was stored; "": none.
	original string
}
