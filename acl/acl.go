// Package acl controls access: topic patterns, policies, and the tokens that carry policies.
//
// A [Verifier] turns a token into an [Identity]. The [Policy] of the Identity decides whether its
// owner may perform an action on a topic. All types except Verifier are immutable and safe for
// concurrent use without a lock. The methods of Verifier may be called concurrently too.
//
// Errors about a token never contain any part of the token. They name the fault and its position
// only.
package acl

// Action is an operation on a topic.
type Action string

// The actions that a policy controls.
const (
	Publish   Action = "publish"
	Subscribe Action = "subscribe"
	// Inspect covers what operators see of a topic without its events: counts, sizes, groups and
	// their lag. Subscribe and Admin cover the same; see [Identity.Inspects].
	Inspect Action = "inspect"
	// Presence covers who listens to broadcasts of a topic.
	Presence Action = "presence"
	// Schema covers the schemas of a topic: to read, compare and register them.
	Schema Action = "schema"
	// Admin covers administrative changes to a topic or its groups, such as moving a cursor.
	Admin Action = "admin"
)

// anyAction in a rule matches every action, including Admin.
const anyAction = "*"

// actions is a set of actions.
type actions uint8

const (
	bitPublish actions = 1 << iota
	bitSubscribe
	bitAdmin
	bitInspect
	bitPresence
	bitSchema

	bitsAll = bitPublish | bitSubscribe | bitAdmin | bitInspect | bitPresence | bitSchema

	// bitsShow are the actions whose rules can show events to operators.
	bitsShow = bitSubscribe | bitAdmin
)

// bits returns the set that contains only a, or the empty set if a is unknown.
func (a Action) bits() actions {
	switch a {
	case Publish:
		return bitPublish
	case Subscribe:
		return bitSubscribe
	case Admin:
		return bitAdmin
	case Inspect:
		return bitInspect
	case Presence:
		return bitPresence
	case Schema:
		return bitSchema
	}
	return 0
}

// parseActions parses the action of a rule or a scope.
func parseActions(text string) (actions, bool) {
	if text == anyAction {
		return bitsAll, true
	}
	set := Action(text).bits()
	return set, set != 0
}
