package jetstream

import (
	"context"
	"errors"
	"strings"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/schemas"
)

// castGiveUp is after how long a delivery is given back whose version this hub could not read.
const castGiveUp = time.Second

// viewsOf returns the views of a subscription on topics; nil without
// SubscribeOptions.SchemaVersion.
func viewsOf(ctx context.Context, r *schemas.Registry, topics []string, version int, client string) (map[string]*schemas.View, error) {
	if version == 0 {
		return nil, nil //nolint:nilnil // events stay as they are
	}
	views := make(map[string]*schemas.View, len(topics))
	for _, topic := range topics {
		v, err := r.View(ctx, topic, version)
		if err != nil {
			return nil, err
		}
		views[topic] = v.CountFor(client)
	}
	return views, nil
}

// versioned reports whether headers name the version of the schema.
func versioned(headers map[string]string) bool {
	for name := range headers {
		if strings.EqualFold(name, schemas.VersionHeader) {
			return true
		}
	}
	return false
}

// Cast turns the event into the version that the subscription asks for
// (SubscribeOptions.SchemaVersion). It waits as long as ctx allows for the ration of the client
// (Limits.ComputeTime). Its error is that of ctx, cputime.ErrOwes or cputime.ErrPlaces, and then
// Cast may be called again. It returns false when the event cannot be cast: then the attempt has
// failed, and the Held is not valid any more. Begin calls Cast. Servers that copy the event call
// Cast before, so that an event takes the memory of its version only on its way to a client.
func (h *Held) Cast(ctx context.Context) (ok bool, err error) {
	if ok, long := h.CastBriefly(); !long {
		return ok, nil
	}
	return h.CastSlowly(ctx)
}

// CastSlowly is Cast after CastBriefly, for what takes long.
func (h *Held) CastSlowly(ctx context.Context) (ok bool, err error) {
	d := (*Delivery)(h)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.m.sub.ctx, cancel)() //nolint:contextcheck // either ends the cast
	v := d.m.sub.views[d.Event.Topic]
	return d.wasCast(d.cast(func(e *event.Event) error { return v.CastSlowly(ctx, e) }))
}

// CastBriefly is Cast for what takes less than about 0.1 ms and waits for no ration. For the rest,
// long is set, and CastSlowly has to be called.
func (h *Held) CastBriefly() (ok, long bool) {
	d := (*Delivery)(h)
	v := d.m.sub.views[d.Event.Topic]
	if v == nil {
		return true, false
	}
	err := d.cast(func(e *event.Event) error { return v.CastBriefly(d.m.sub.ctx, e, d.arrived) })
	switch {
	case errors.Is(err, schemas.ErrNoVersions):
		d.giveUpSoon() // whether there is such a version, a later delivery tells
		return false, false
	case errors.Is(err, schemas.ErrLong):
		return false, true
	}
	ok, _ = d.wasCast(err)
	return ok, false
}

// cast runs f on the event, and notes whether f has changed its version.
func (d *Delivery) cast(f func(*event.Event) error) error {
	was := d.Event.Headers[schemas.VersionHeader]
	err := f(&d.Event)
	d.recast = d.recast || err == nil && d.Event.Headers[schemas.VersionHeader] != was
	return err
}

// wasCast deals with the error of a cast. It returns those after which the cast may be repeated.
func (d *Delivery) wasCast(err error) (ok bool, _ error) {
	if d.m.sub.ctx.Err() != nil {
		return false, nil //nolint:nilerr // the subscription gives back what it holds
	}
	if err == nil {
		return true, nil
	}
	e, failed := errors.AsType[*event.Error](err)
	if !failed {
		return false, err
	}
	if d.begin(false) {
		d.m.sub.nack(d, "", e.Msg, DefaultBackoff)
	}
	return false, nil
}

// giveUpSoon gives a delivery back that was not begun, after castGiveUp, so that it does not come
// again at once. It counts for no attempt.
func (d *Delivery) giveUpSoon() {
	s := d.m.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running() {
		return // the subscription gives back what it holds
	}
	s.wg.Go(func() {
		timer := time.NewTimer(castGiveUp)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-s.ctx.Done():
		}
		s.mu.Lock()
		ours := d.index >= 0 && !d.begun && s.remove(d, event.Returned)
		s.mu.Unlock()
		if ours {
			s.spare(d, true)
		}
	})
}
