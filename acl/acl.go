// Package acl decides who may do what: topic patterns, policies, and the tokens that carry them.
//
// A [Verifier] turns a token into an [Identity], and the Identity's [Policy] answers whether its
// owner may do an action on a topic. Everything but the Verifier is immutable after it was made and
// may be used concurrently without a lock.
//
// Errors about a token never hold a part of it: they say what is wrong and where, not what it says
// there.
package acl

// Action is what somebody wants to do with a topic.
type Action string

// The actions that a policy decides on.
const (
	Publish   Action = "publish"
	Subscribe Action = "subscribe"
	// Admin is what changes a topic or its groups from outside, such as moving a cursor.
	Admin Action = "admin"
)

// anyAction stands in a rule for every action, Admin included.
const anyAction = "*"

// actions is a set of actions.
type actions uint8

const (
	bitPublish actions = 1 << iota
	bitSubscribe
	bitAdmin

	bitsAll = bitPublish | bitSubscribe | bitAdmin
)

// bits returns the set that holds a alone; it is empty for what is no action.
func (a Action) bits() actions {
	switch a {
	case Publish:
		return bitPublish
	case Subscribe:
		return bitSubscribe
	case Admin:
		return bitAdmin
	}
	return 0
}

// parseActions reads the action of a rule or a scope.
func parseActions(text string) (actions, bool) {
	if text == anyAction {
		return bitsAll, true
	}
	set := Action(text).bits()
	return set, set != 0
}
