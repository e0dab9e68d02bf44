package ops

import (
	"net"
	"net/http"
	"strings"
)

// local answers only requests whose Host is an IP address or localhost. Without this check, a web
// page in a browser on this host could read a handler that is open on loopback, by making its own
// name resolve to this host (DNS rebinding).
func local(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !IsLocal(r.Host) {
			writeError(w, http.StatusForbidden, "forbidden", "Use this host's IP address or localhost, or configure the hub to require a token for the metrics.")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// IsLocal reports whether the Host of a request is an IP address or localhost. It is then not the
// name of a page that made its name resolve to this host.
func IsLocal(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.Trim(host, "[]")
	return host == "localhost" || strings.HasSuffix(host, ".localhost") || net.ParseIP(host) != nil
}
