package embedded

import (
	"fmt"

	natsserver "github.com/nats-io/nats-server/v2/server"
)

// HubAccount is the account of the bus and of all clients.
const HubAccount = natsserver.DEFAULT_GLOBAL_ACCOUNT

// calloutSeconds is how long the server waits for the answer about a client. Clients of nats.go
// wait for 2 s by default. The end of the server waits for those that are being asked about.
const calloutSeconds = 5

// Callout has the bus decide about native clients.
type Callout struct {
	// Issuer and XKey are the public keys of jetstream.CalloutConfig. Required.
	Issuer, XKey string
	// System is the subject of the system account that the bus may use: jetstream.KickSubject.
	// Required.
	System string
	// Guarded has each connection of a client pass a guard, which removes reply subjects outside
	// the inbox of the client. Nothing else checks them; see jetstream.NativeGuard. The server
	// itself then listens on a port of loopback, where the bus refuses clients that did not pass
	// the guard.
	Guarded bool
}

// configure sets the options of a server. The bus is the user, about which it is not asked itself.
func (c *Callout) configure(opts *natsserver.Options, user string) {
	opts.Nkeys = []*natsserver.NkeyUser{{Nkey: user}}
	opts.AuthCallout = &natsserver.AuthCallout{Issuer: c.Issuer, XKey: c.XKey, Account: HubAccount, AuthUsers: []string{user}}
	opts.AuthTimeout = calloutSeconds
}

// connect connects the accounts of a server that runs.
func (c *Callout) connect(s *natsserver.Server) error {
	hub, system := s.GlobalAccount(), s.SystemAccount()
	if err := system.AddServiceExport(c.System, []*natsserver.Account{hub}); err != nil {
		return fmt.Errorf("export %s: %w", c.System, err)
	}
	if err := hub.AddServiceImport(system, c.System, c.System); err != nil {
		return fmt.Errorf("import %s: %w", c.System, err)
	}
	return nil
}

// Origin implements jetstream.NativeGuard.
func (e *Server) Origin(server string, id uint64) (address string, ok bool) {
	return e.guard.origin(guardedID{server, id})
}

// Admit implements jetstream.NativeGuard.
func (e *Server) Admit(server string, id uint64, inbox, owner string) {
	e.guard.admit(guardedID{server, id}, inbox, owner)
}
