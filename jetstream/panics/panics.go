// Package panics is the one place for panics that the process survives: those of functions that
// users supply, and those of the hub's own code in a request, a frame or a question over NATS.
package panics

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
)

// noted counts the calls of Note.
var noted atomic.Uint64

// Count returns how many panics this process has survived.
func Count() uint64 { return noted.Load() }

// Note logs a panic with the stack of the goroutine, and counts it. Call Note from a deferred
// function, with what recover returned. name says what panicked, and must hold nothing that a
// client wrote: the pattern of a route, or the name of a function.
func Note(log *slog.Logger, name string, cause any) {
	noted.Add(1)
	log.Error("survived a panic", slog.String("func", name),
		slog.String("panic", fmt.Sprint(cause)), slog.String("stack", string(debug.Stack())))
}

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

// Call calls f and returns its error. When f panics, Call notes the panic and returns an *Error
// with the name. Call treats an error whose Error method panics, such as a nil pointer in
// an error, as a panic of f. Fatal errors of the Go runtime, such as concurrent map writes, still
// end the process.
func Call(log *slog.Logger, name string, f func() error) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			Note(log, name, cause)
			err = &Error{name}
		}
	}()
	if err = f(); err != nil {
		_ = err.Error() // callers call Error where nothing would recover its panic
	}
	return err
}

// Run is Call for a function without an error.
func Run(log *slog.Logger, name string, f func()) {
	_ = Call(log, name, func() error { f(); return nil })
}
