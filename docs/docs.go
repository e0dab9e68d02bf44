// Package docs holds the documents that describe the interfaces of the hub to programs:
// openapi.yaml for HTTP, and asyncapi.yaml for the frames of the WebSocket. Its tests check the
// form of all prose in the repository, comments included.
package docs

import (
	"crypto/sha256"
	_ "embed" // the documents
	"encoding/hex"
	"net/http"
	"strings"
)

// OpenAPI is the OpenAPI document of the HTTP API and of the operations API.
//
//go:embed openapi.yaml
var OpenAPI []byte

// AsyncAPI is the AsyncAPI document of the frames of the WebSocket.
//
//go:embed asyncapi.yaml
var AsyncAPI []byte

// Handlers returns the handlers of both documents by their paths. The documents are the same for
// every hub and show nothing of its data.
func Handlers() map[string]http.Handler {
	return map[string]http.Handler{
		"/openapi.yaml":  serve(OpenAPI),
		"/asyncapi.yaml": serve(AsyncAPI),
	}
}

// serve returns a handler that answers with a document, or with 304 to a client that has it.
func serve(document []byte) http.Handler {
	sum := sha256.Sum256(document)
	tag := `"` + hex.EncodeToString(sum[:16]) + `"`
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Cache-Control", "no-cache")
		h.Set("ETag", tag)
		if strings.Contains(strings.Join(r.Header.Values("If-None-Match"), ","), tag) {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		h.Set("Content-Type", "application/yaml")
		h.Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write(document)
	})
}
