// Package panics turns panics in the functions that users supply into errors, so that one bad event
// does not end the process.
package panics

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
)

// Error is returned by Call when the function panicked. Its text names the function only, because
// it may reach clients; the log has the rest.
type Error struct {
	// Func is the name that Call was given.
	Func string
}

// Error says which function panicked.
func (e *Error) Error() string { return e.Func + " panicked: the log has the stack" }

// Is reports whether err comes from a panic.
func Is(err error) bool {
	_, ok := errors.AsType[*Error](err)
	return ok
}

// Call calls f and returns its error. When f panics, Call logs the panic with its stack and returns
// an *Error with the name. Fatal errors of the Go runtime, such as concurrent map writes, still end
// the process.
func Call(log *slog.Logger, name string, f func() error) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			log.Error("callback panicked", slog.String("func", name),
				slog.String("panic", fmt.Sprint(cause)), slog.String("stack", string(debug.Stack())))
			err = &Error{name}
		}
	}()
	return f()
}

// Run is Call for a function without an error.
func Run(log *slog.Logger, name string, f func()) {
	_ = Call(log, name, func() error { f(); return nil })
}
