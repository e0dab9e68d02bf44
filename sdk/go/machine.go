package eventhub

// State is a state of the connection.
type State string

// The states of a connection.
const (
	StateIdle           State = "idle"
	StateToken          State = "token"
	StateOpening        State = "opening"
	StateAuthenticating State = "authenticating"
	StateReady          State = "ready"
	StateWaiting        State = "waiting"
	StateFailed         State = "failed"
	StateClosed         State = "closed"
)

// input is what happens to a connection.
type input string

const (
	inputStart    input = "start"    // the client wants a connection
	inputToken    input = "token"    // the token provider answered
	inputOpen     input = "open"     // the WebSocket is open
	inputAccepted input = "accepted" // the hub accepted the token
	inputLost     input = "lost"     // it is over, and another attempt may succeed
	inputRefused  input = "refused"  // it is over, and no attempt would succeed
	inputWake     input = "wake"     // the pause is over
	inputClose    input = "close"    // the client closes
)

// action is what a transition does.
type action string

const (
	actFetch   action = "fetch"   // ask the token provider
	actDial    action = "dial"    // open a WebSocket
	actAuth    action = "auth"    // send AUTH
	actResume  action = "resume"  // subscribe again and send what waits
	actSuspend action = "suspend" // forget leases, and note publishes in doubt
	actDrop    action = "drop"    // close the WebSocket
	actPause   action = "pause"   // wait for a while that grows with each attempt
	actEnd     action = "end"     // fail everything that waits
)

type transition struct {
	next    State
	actions []action
}

// table is the life of a connection: for each state and input, the next state and what has to be
// done. An input that a state does not list changes nothing. The clients in other languages follow
// the same table. README.md shows the table, and a test compares the two.
var table = map[State]map[input]transition{
	StateIdle: {
		inputStart: {StateToken, []action{actFetch}},
		inputClose: {StateClosed, []action{actEnd}},
	},
	StateToken: {
		inputToken:   {StateOpening, []action{actDial}},
		inputLost:    {StateWaiting, []action{actPause}},
		inputRefused: {StateFailed, []action{actEnd}},
		inputClose:   {StateClosed, []action{actEnd}},
	},
	StateOpening: {
		inputOpen:    {StateAuthenticating, []action{actAuth}},
		inputLost:    {StateWaiting, []action{actDrop, actPause}},
		inputRefused: {StateFailed, []action{actDrop, actEnd}},
		inputClose:   {StateClosed, []action{actDrop, actEnd}},
	},
	StateAuthenticating: {
		inputAccepted: {StateReady, []action{actResume}},
		inputLost:     {StateWaiting, []action{actDrop, actPause}},
		inputRefused:  {StateFailed, []action{actDrop, actEnd}},
		inputClose:    {StateClosed, []action{actDrop, actEnd}},
	},
	StateReady: {
		inputLost:    {StateWaiting, []action{actDrop, actSuspend, actPause}},
		inputRefused: {StateFailed, []action{actDrop, actSuspend, actEnd}},
		inputClose:   {StateClosed, []action{actDrop, actSuspend, actEnd}},
	},
	StateWaiting: {
		inputWake:  {StateToken, []action{actFetch}},
		inputClose: {StateClosed, []action{actEnd}},
	},
	StateFailed: {},
	StateClosed: {},
}
