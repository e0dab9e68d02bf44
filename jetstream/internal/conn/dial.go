package conn

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/nats-io/nats.go"
)

// Connection connects to NATS. The caller closes the connection.
func (p *Pool) Connection(name string, opts ...nats.Option) (*nats.Conn, error) {
	all, err := p.natsOptions()
	if err != nil {
		return nil, err
	}
	all = append(append(all, opts...), nats.Name(name), nats.ErrorHandler(func(_ *nats.Conn, s *nats.Subscription, err error) {
		subject := ""
		if s != nil {
			subject = s.Subject
		}
		cause := err
		for next := errors.Unwrap(cause); next != nil; next = errors.Unwrap(next) {
			cause = next // err may name a subject of a client
		}
		p.cfg.Warn(p.Ctx, "nats reported an error", cause.Error(), slog.Any("error", err), slog.String("subject", subject))
	}))
	address := p.cfg.URL
	if p.cfg.Embedded != nil {
		var own []nats.Option
		address, own = p.cfg.Embedded.Connection()
		all = append(all, own...)
	}
	return nats.Connect(address, all...)
}

// natsOptions are what every connection is made with.
func (p *Pool) natsOptions() ([]nats.Option, error) {
	opts := []nats.Option{
		nats.MaxReconnects(-1),
		nats.ReconnectWait(100 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 100*time.Millisecond),
		// never keep acks of leases that may have ended, to send them late
		nats.ReconnectBufSize(-1),
		nats.SkipSubjectValidation(), // names are checked and escaped before they become subjects
		nats.PingInterval(5 * time.Second),
		nats.MaxPingsOutstanding(2),
		nats.Timeout(dialWait),
	}
	if p.cfg.Embedded != nil {
		return opts, nil // the server has its own
	}
	opts = append(opts, nats.SetCustomDialer(&net.Dialer{Timeout: dialWait, Control: limitUnacked(p.cfg.Margin * 4 / 5)}))
	if p.cfg.Creds != "" {
		opts = append(opts, nats.UserCredentials(p.cfg.Creds))
	}
	if p.cfg.NKeySeed != "" {
		o, err := nats.NkeyOptionFromSeed(p.cfg.NKeySeed)
		if err != nil {
			return nil, fmt.Errorf("nkey seed file %s: %w", p.cfg.NKeySeed, err)
		}
		opts = append(opts, o)
	}
	if p.cfg.TLSCA != "" {
		opts = append(opts, nats.RootCAs(p.cfg.TLSCA))
	}
	if p.cfg.TLSCert != "" {
		opts = append(opts, nats.ClientCert(p.cfg.TLSCert, p.cfg.TLSKey))
	}
	return opts, nil
}
