//go:build unix

package main

import (
	"io"
	"net/http"
	"testing"

	"eventhub/docs"
	"eventhub/docs/apitest"
)

// A hub serves the documents of its interfaces on both ports, without a token.
func TestHubServesItsDocuments(t *testing.T) {
	t.Parallel()
	hub := startNode(t)
	for port, base := range map[apitest.Port]string{apitest.Clients: hub.http, apitest.Operators: hub.ops} {
		web := &http.Client{Transport: apitest.Transport(t, port, http.DefaultTransport)}
		for path, want := range map[string][]byte{"/openapi.yaml": docs.OpenAPI, "/asyncapi.yaml": docs.AsyncAPI} {
			res, err := web.Get(base + path)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(res.Body)
			if err != nil {
				t.Fatal(err)
			}
			_ = res.Body.Close()
			if res.StatusCode != http.StatusOK || string(got) != string(want) {
				t.Errorf("GET %s%s: %d %.200s", base, path, res.StatusCode, got)
			}
		}
	}
}
