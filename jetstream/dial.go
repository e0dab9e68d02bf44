package jetstream

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/nats-io/nats.go"
)

// connection connects to NATS. The caller closes the connection.
func (p *pool) connection(name string, opts ...nats.Option) (*nats.Conn, error) {
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
		p.cfg.warn(p.ctx, "nats reported an error", cause.Error(), slog.Any("error", err), slog.String("subject", subject))
	}))
	address := p.cfg.url
	if p.cfg.embedded != nil {
		var own []nats.Option
		address, own = p.cfg.embedded.Connection()
		all = append(all, own...)
	}
	return nats.Connect(address, all...)
}

// natsOptions are what every connection is made with.
func (p *pool) natsOptions() ([]nats.Option, error) {
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
	if p.cfg.embedded != nil {
		return opts, nil // the server has its own
	}
	opts = append(opts, nats.SetCustomDialer(&net.Dialer{Timeout: dialWait, Control: limitUnacked(p.cfg.margin * 4 / 5)}))
	if p.cfg.creds != "" {
		opts = append(opts, nats.UserCredentials(p.cfg.creds))
	}
	if p.cfg.nkeySeed != "" {
		o, err := nats.NkeyOptionFromSeed(p.cfg.nkeySeed)
		if err != nil {
			return nil, fmt.Errorf("nkey seed file %s: %w", p.cfg.nkeySeed, err)
		}
		opts = append(opts, o)
	}
	if p.cfg.tlsCA != "" {
		opts = append(opts, nats.RootCAs(p.cfg.tlsCA))
	}
	if p.cfg.tlsCert != "" {
		opts = append(opts, nats.ClientCert(p.cfg.tlsCert, p.cfg.tlsKey))
	}
	return opts, nil
}
