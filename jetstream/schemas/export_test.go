package schemas

import (
	"context"

	"eventhub/jetstream/event"
)

// ErrVersionUnknown is the cause of an error about a version that is not registered.
var ErrVersionUnknown = errVersionUnknown

// Deafen has the view never learn of versions that it does not have yet.
func (v *View) Deafen() {
	deaf := &topicVersions{}
	deaf.set.Store(v.of.set.Load())
	v.of = deaf
}

// CastUnasked is CastBriefly without a question to the server.
func (v *View) CastUnasked(ctx context.Context, e *event.Event) error {
	return v.castBy(ctx, e, v.registry.computing.castBriefly)
}

// Asked reports whether the server has answered a question for further versions.
func (v *View) Asked() bool { return v.of.looked.Load() != 0 }
