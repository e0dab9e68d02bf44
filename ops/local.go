package ops

import (
	"net"
	"net/http"
	"strings"
)

// local answers only requests that name this host by an address or as localhost. What is open because the port is bound to
// loopback would otherwise be open to any page in a browser on this host whose name resolves to it (DNS rebinding).
func local(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !isLocal(r.Host) {
			http.Error(w, "Ask for this host by its address or as localhost, or with a token, where the hub asks for one.", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func isLocal(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.Trim(host, "[]")
	return host == "localhost" || strings.HasSuffix(host, ".localhost") || net.ParseIP(host) != nil
}
