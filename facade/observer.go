package facade

// Observer counts events of the facade. Its methods are called on the hot path by many goroutines:
// they must be safe for concurrent use and must not block.
type Observer interface {
	// ConnectionOpened counts a WebSocket connection that was accepted.
	ConnectionOpened()
	// ConnectionClosed counts the end of a connection. closeCode is the WebSocket close code that
	// either side gave, or 1006 when the connection was lost.
	ConnectionClosed(closeCode int)
	// FrameReceived counts a client's frame. op is one of the protocol's ops, or "unknown".
	FrameReceived(op string)
	// ErrorSent counts an ERR frame, or an error over HTTP.
	ErrorSent(code string)
	// LimitReached counts a refusal or a wait because of the named limit (see Limits).
	LimitReached(limit string)
	// RequestServed counts an HTTP request by its status.
	RequestServed(status int)
	// EventsRead counts events that replays and exports have read.
	EventsRead(n int)
	// Consumers adds delta to the number of consumers over HTTP. kind is "stream", or "pull" for a
	// pull that waits for events or whose events are not all settled.
	Consumers(kind string, delta int)
	// StreamClosed counts the end of a stream of server-sent events. closeCode is a close code, as
	// that of a WebSocket would be: 1006 when the client has gone.
	StreamClosed(closeCode int)
	// Settled counts events that clients settled over HTTP. op is ack, nack or modack, and result
	// is settled, over (the lease had ended), or silent (another hub did not answer).
	Settled(op, result string, n int)
}

type nopObserver struct{}

var _ Observer = nopObserver{}

func (nopObserver) ConnectionOpened()           {}
func (nopObserver) ConnectionClosed(int)        {}
func (nopObserver) FrameReceived(string)        {}
func (nopObserver) ErrorSent(string)            {}
func (nopObserver) LimitReached(string)         {}
func (nopObserver) RequestServed(int)           {}
func (nopObserver) EventsRead(int)              {}
func (nopObserver) Consumers(string, int)       {}
func (nopObserver) StreamClosed(int)            {}
func (nopObserver) Settled(string, string, int) {}
