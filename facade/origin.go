package facade

import (
	"fmt"
	"net/http"
	"net/url"
	"path"
	"regexp"
	"strings"

	"github.com/rs/cors"
)

// preflightAge is how long a browser may keep the answer to a preflight, in seconds.
const preflightAge = 600

// originHost is a host name as a browser puts it into an Origin: labels, or an IPv6 address.
var originHost = regexp.MustCompile(`^([a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])$`)

// origin is a web origin, or a pattern of Config.Origins.
type origin struct {
	scheme, host, port string
}

// parseOrigin takes scheme://host and scheme://host:port apart. It reports false for anything else.
// A pattern may have * in its host and its port.
func parseOrigin(s string, pattern bool) (origin, bool) {
	scheme, rest, ok := strings.Cut(strings.ToLower(s), "://")
	if !ok || scheme == "" || rest == "" {
		return origin{}, false
	}
	o := origin{scheme: scheme, host: rest}
	if i := strings.LastIndexByte(rest, ':'); i > strings.LastIndexByte(rest, ']') {
		o.host, o.port = rest[:i], rest[i+1:]
		if strings.Trim(o.port, "0123456789") != "" && (!pattern || o.port != "*") || o.port == "" {
			return origin{}, false
		}
	}
	host := o.host
	if pattern {
		host = strings.ReplaceAll(host, "*", "a")
	}
	if !originHost.MatchString(host) {
		return origin{}, false
	}
	u, err := url.Parse(o.scheme + "://" + host)
	return o, err == nil && u.Host == host
}

// matches reports whether an origin fits a pattern. An asterisk stands for any part of the host
// name, dots included, and never for anything beside the host name.
func (pattern origin) matches(o origin) bool {
	if pattern.scheme != o.scheme || pattern.port != o.port && (pattern.port != "*" || o.port == "") {
		return false
	}
	// an IPv6 address, which path.Match would take for a class
	if strings.HasPrefix(pattern.host, "[") {
		return pattern.host == o.host
	}
	ok, err := path.Match(pattern.host, o.host)
	return err == nil && ok
}

// ValidOrigin says what is wrong with an element of Config.Origins.
func ValidOrigin(pattern string) error {
	if _, ok := parseOrigin(pattern, true); !ok {
		return fmt.Errorf("%q: use scheme://host or scheme://host:port, with * for any part of the host or for the port", pattern)
	}
	return nil
}

// originAllowed reports whether a page of this origin may connect. "" is a client that is no web
// page.
func (cfg *Config) originAllowed(given string) bool {
	if given == "" || cfg.Origins == nil {
		return true
	}
	o, ok := parseOrigin(given, false)
	if !ok {
		return false
	}
	for _, p := range cfg.Origins {
		if pattern, ok := parseOrigin(p, true); ok && pattern.matches(o) {
			return true
		}
	}
	return false
}

// crossOrigin lets pages of Config.Origins use the HTTP API: it answers preflights, and names the
// origin in answers. A page never gets the browser's own credentials, such as cookies, along with a
// request: it must have a token.
func (s *Server) crossOrigin(next http.Handler) http.Handler {
	return cors.New(cors.Options{
		AllowOriginFunc: s.cfg.originAllowed,
		AllowedMethods:  []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodDelete},
		// without credentials of the browser's own, a header does no harm
		AllowedHeaders: []string{"*"},
		ExposedHeaders: []string{"ETag", "Retry-After", headerTruncated, headerFirstID, headerNewestID, headerPosition},
		MaxAge:         preflightAge,
	}).Handler(next)
}
