package facade

import (
	"net/http"
	"slices"
	"time"

	"github.com/coder/websocket"
)

// A code identifies an error to programs, on the WebSocket and over HTTP alike.
type code string

// The codes of the protocol. Errors of the bus use the same strings.
const (
	codeNoToken           code = "no_token"
	codeBadToken          code = "bad_token"
	codeJWTInvalid        code = "jwt_invalid"
	codeUnauthorized      code = "unauthorized"
	codeForbidden         code = "forbidden"
	codeTokenExpired      code = "token_expired"
	codeBadJSON           code = "bad_json"
	codeBadFrame          code = "bad_frame"
	codeUnknownOp         code = "unknown_op"
	codeBadTopic          code = "bad_topic"
	codeBadGroup          code = "bad_group"
	codeBadOptions        code = "bad_options"
	codePublishFailed     code = "publish_failed"
	codeSubscribeFailed   code = "subscribe_failed"
	codeAlreadySubscribed code = "already_subscribed"
	codeNotSubscribed     code = "not_subscribed"
	codeAckFailed         code = "ack_failed"
	codeBadHandle         code = "bad_handle"
	codeLeaseOver         code = "lease_over"
	codeUnknownID         code = "unknown_id"
	codeNotFound          code = "not_found"
	codeRateLimited       code = "rate_limited"
	codeOverloaded        code = "overloaded"
	codeInternal          code = "internal"
	codeGroupReset        code = "group_reset"
	codeEventsLost        code = "events_lost"
	codeTopicFull         code = "topic_full"
	codeStorageLow        code = "storage_low"
	codeSchemaInvalid     code = "schema_invalid"
	codeSchemaConflict    code = "schema_conflict"
)

// A rule holds the consequences of a code.
type rule struct {
	// status is the HTTP status.
	status int
	// retry reports whether the same request may succeed later, unchanged. Clients increase the
	// pause from try to try.
	retry bool
	// meaning is for the documentation.
	meaning string
}

// rules is the one table of codes. Other languages read it as testdata/errors.json.
var rules = map[code]rule{
	codeNoToken:           {http.StatusUnauthorized, false, "No credential was given."},
	codeBadToken:          {http.StatusUnauthorized, false, "The token is not the configured one."},
	codeJWTInvalid:        {http.StatusUnauthorized, false, "The JWT is malformed, expired, or not signed by a trusted key."},
	codeUnauthorized:      {http.StatusUnauthorized, false, "The connection has not authenticated: send AUTH first."},
	codeForbidden:         {http.StatusForbidden, false, "The policy does not allow this action on this topic."},
	codeTokenExpired:      {http.StatusUnauthorized, false, "The token has expired or was revoked, and the connection is being closed: connect again with a fresh one."},
	codeBadJSON:           {http.StatusBadRequest, false, "The text is not valid JSON."},
	codeBadFrame:          {http.StatusBadRequest, false, "A field is missing or of the wrong type; the message names it."},
	codeUnknownOp:         {http.StatusBadRequest, false, "The hub does not know this op."},
	codeBadTopic:          {http.StatusBadRequest, false, "The topic is not well formed."},
	codeBadGroup:          {http.StatusBadRequest, false, "The group name is not well formed."},
	codeBadOptions:        {http.StatusBadRequest, false, "An option is of the wrong type, out of range or reserved; the message names it."},
	codePublishFailed:     {http.StatusServiceUnavailable, true, "The event was not confirmed. It may have been stored all the same: repeat it with the same opts.id."},
	codeSubscribeFailed:   {http.StatusServiceUnavailable, true, "The subscription could not be made."},
	codeAlreadySubscribed: {http.StatusBadRequest, false, "This connection has this subscription already; the message is topic::group."},
	codeNotSubscribed:     {http.StatusBadRequest, false, "This connection has no such subscription; the message is topic::group."},
	codeAckFailed:         {http.StatusServiceUnavailable, true, "The acknowledgement could not be passed on."},
	codeBadHandle:         {http.StatusBadRequest, false, "The text is not a handle that a hub gave with an event. Nothing was settled."},
	codeLeaseOver:         {http.StatusGone, false, "The lease of the handle is over, or its hub is gone. Nothing was settled; the event comes again unless it was settled before."},
	codeUnknownID:         {http.StatusNotFound, false, "No event of this id is in flight, or was found to start after."},
	codeNotFound:          {http.StatusNotFound, false, "There is nothing of this name."},
	codeRateLimited:       {http.StatusTooManyRequests, true, "This client asks too much: slow down."},
	codeOverloaded:        {http.StatusServiceUnavailable, true, "The hub is at one of its limits."},
	// group_reset answers no request. Nothing else has this status.
	codeGroupReset: {http.StatusConflict, false, "The group had to start anew and may have missed events; the message is topic::group. It answers no request."},
	// events_lost answers no request either.
	codeEventsLost:     {http.StatusGone, false, "Events were removed before the group was given them; the message is topic::group, how many, and since when. It answers no request."},
	codeTopicFull:      {http.StatusInsufficientStorage, true, "The topic is at its bound, and groups have not acknowledged its oldest events. Nothing was stored."},
	codeStorageLow:     {http.StatusInsufficientStorage, true, "NATS has no room left beyond what the hub keeps for itself, or this client has stored more than its share. Nothing was stored."},
	codeSchemaInvalid:  {http.StatusUnprocessableEntity, false, "The payload breaks the schema of the topic; the message has a JSON pointer and the keyword. Nothing was stored."},
	codeSchemaConflict: {http.StatusConflict, false, "The version of the schema is not compatible, or another one was registered at the same time; the message says which. Nothing was registered."},
	codeInternal:       {http.StatusServiceUnavailable, true, "The hub failed; the cause is in its log."},
}

// tooLarge replaces the rule of publish_failed when the event exceeds the size limit.
var tooLarge = rule{http.StatusRequestEntityTooLarge, false, "The event is larger than the hub takes; the message names the limit."}

// otherOrder replaces the rule of subscribe_failed when the group orders its events otherwise.
var otherOrder = rule{http.StatusConflict, false, "The group is ordered and the request is not, or the other way round; the message says which."}

// rule returns the rule of c. An unknown code counts as internal.
func (c code) rule() rule {
	if r, ok := rules[c]; ok {
		return r
	}
	return rules[codeInternal]
}

// ErrorCodes returns all error codes of the protocol, sorted.
func ErrorCodes() []string {
	var all []string
	for c := range rules {
		all = append(all, string(c))
	}
	slices.Sort(all)
	return all
}

// CloseCodes returns all codes with which the hub closes a WebSocket, sorted.
func CloseCodes() []int {
	var all []int
	for c := range closings {
		all = append(all, int(c))
	}
	for _, c := range otherCloses {
		all = append(all, int(c))
	}
	slices.Sort(all)
	return all
}

// StatusOf returns the HTTP status of an error code. Other planes of a hub answer with it.
func StatusOf(name string) int { return code(name).rule().status }

// A fault is an error that a client is told. msg is safe to show.
type fault struct {
	code code
	msg  string
	// wait is the time after which a retry may succeed; 0 when unknown.
	wait time.Duration
	// tooLarge marks a publish_failed that is due to size, so that HTTP answers 413.
	tooLarge bool
	// permanent marks a subscribe_failed that comes again.
	permanent bool
	// ends marks a fault after which the connection ends.
	ends bool
}

// Error is what the log says of a fault.
func (f *fault) Error() string { return string(f.code) + ": " + f.msg }

// rule returns the rule of the fault.
func (f *fault) rule() rule {
	if f.tooLarge {
		return tooLarge
	}
	if f.permanent {
		return otherOrder
	}
	return f.code.rule()
}

// final reports whether the same request fails again although the code may mean otherwise.
func (f *fault) final() bool { return f.code.rule().retry && !f.rule().retry }

// The codes with which the hub closes a WebSocket. After 4000..4099 a client should reconnect, with
// increasing pauses. After 4100..4199 it should not reconnect until somebody has changed something.
const (
	closeDraining     websocket.StatusCode = 4000
	closeSlowConsumer websocket.StatusCode = 4001
	closeAuthTimeout  websocket.StatusCode = 4002
	closeTokenExpired websocket.StatusCode = 4003
	closePeerSilent   websocket.StatusCode = 4004
	closeByOperator   websocket.StatusCode = 4005

	closeBinaryMessage  websocket.StatusCode = 4100
	closeProtocolErrors websocket.StatusCode = 4101
	closeMessageTooBig  websocket.StatusCode = 4102
	closeAuthRefused    websocket.StatusCode = 4103

	// closeGiveUp is the first code of the second range.
	closeGiveUp websocket.StatusCode = 4100
)

// otherCloses are the codes of RFC 6455 with which the hub closes a WebSocket: for a message that
// is not UTF-8, and after a panic.
var otherCloses = []websocket.StatusCode{websocket.StatusInvalidFramePayloadData, websocket.StatusInternalError}

// A closing describes a close code.
type closing struct {
	// name is the reason sent with the code.
	name string
	// meaning is for the documentation.
	meaning string
}

// closings is the one table of close codes. Other languages read it as testdata/errors.json.
var closings = map[websocket.StatusCode]closing{
	closeDraining:     {"draining", "The hub is shutting down; another, or the next, takes over."},
	closeSlowConsumer: {"slow_consumer", "The client did not read what was sent for too long."},
	closeAuthTimeout:  {"auth_timeout", "No AUTH came in time after the connection was made."},
	closeTokenExpired: {"token_expired", "The token has expired or was revoked: connect again with a fresh one."},
	closePeerSilent:   {"peer_silent", "The client did not answer pings."},
	closeByOperator:   {"closed_by_operator", "An operator closed the connection."},

	closeBinaryMessage:  {"binary_message", "A binary message came; frames are text messages."},
	closeProtocolErrors: {"protocol_errors", "The client kept sending frames that the hub could not read."},
	closeMessageTooBig:  {"message_too_big", "A message was far above the limit and could not be skipped."},
	closeAuthRefused:    {"auth_refused", "AUTH was refused too many times, on this connection or from this address."},
}
