package facade

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
)

// ParseProxy parses an entry of Config.TrustedProxies: an address such as 10.0.0.7, or a range of
// addresses such as 10.0.0.0/24.
func ParseProxy(text string) (netip.Prefix, error) {
	if at, err := netip.ParseAddr(text); err == nil && at.Zone() == "" {
		at = at.Unmap()
		return netip.PrefixFrom(at, at.BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is neither an address nor a range of addresses; write 10.0.0.7 or 10.0.0.0/24", text)
	}
	return p, checkProxy(p)
}

func checkProxy(p netip.Prefix) error {
	switch {
	case !p.IsValid():
		return errors.New("the range is not set")
	case p.Bits() == 0:
		return fmt.Errorf("%s trusts every client to name its own address; give the addresses of the proxies", p)
	case p.Addr().Is4In6():
		return fmt.Errorf("%s is a range of IPv4 addresses in the form of IPv6; write the range in the form of IPv4", p)
	case p != p.Masked():
		return fmt.Errorf("%s has address bits beyond its length; write %s or the address alone", p, p.Masked())
	}
	return nil
}

// remoteOf returns the address of the client of a request: that of the peer, with its port, unless
// the peer is a trusted proxy. Each proxy appends the address of its own peer to X-Forwarded-For.
// Read from its end, the header is therefore true up to the first address that is no trusted
// proxy. A client may have made up everything before that address.
func (s *Server) remoteOf(r *http.Request) string {
	remote := r.RemoteAddr
	if len(s.cfg.TrustedProxies) == 0 {
		return remote
	}
	hops := strings.Join(r.Header.Values("X-Forwarded-For"), ",")
	for at, ok := hostOf(remote); ok && s.trusts(at); {
		i := strings.LastIndexByte(hops, ',')
		if at, ok = hostOf(strings.TrimSpace(hops[i+1:])); ok {
			remote = at.String()
		}
		hops = hops[:max(i, 0)]
	}
	return remote
}

// trusts reports whether an address is that of a trusted proxy.
func (s *Server) trusts(at netip.Addr) bool {
	for _, p := range s.cfg.TrustedProxies {
		if p.Contains(at) {
			return true
		}
	}
	return false
}

// hostOf takes the address out of an address with or without a port. It returns false for anything
// else, such as the address of a Unix socket.
func hostOf(text string) (netip.Addr, bool) {
	at, err := netip.ParseAddr(text)
	if err != nil {
		with, err := netip.ParseAddrPort(text)
		if err != nil {
			return netip.Addr{}, false
		}
		at = with.Addr()
	}
	return at.Unmap().WithZone(""), true
}
