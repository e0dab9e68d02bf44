//go:build unix && !race

package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
)

// testTypeScriptExamplePage fills in the form of sdk/examples/page.html, and compares what the page
// shows with what the file says.
func testTypeScriptExamplePage(t *testing.T, sdk string) {
	t.Helper()
	const name = "examples/page.html"
	text, err := os.ReadFile(filepath.Join(sdk, filepath.FromSlash(name)))
	if err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	for _, line := range regexp.MustCompile(`(?m)^<!-- Prints: (.*) -->$`).FindAllSubmatch(text, -1) {
		want.Write(line[1])
		want.WriteByte('\n')
	}
	if want.Len() == 0 {
		t.Fatalf("%s does not say what it prints", name)
	}
	hub := startNode(t)
	site := httptest.NewServer(http.FileServer(http.Dir(sdk)))
	t.Cleanup(site.Close)

	b := openBrowser(t)
	b.do(chromedp.Navigate(site.URL + "/" + name))
	b.until("the page is ready", `document.readyState === "complete" && document.querySelector("form").onsubmit`)
	b.set("input[name=url]", hub.url)
	b.set("input[name=token]", nodeToken)
	b.click("Connect")
	b.until("the page shows what it says", fmt.Sprintf("document.getElementById('list').textContent === %q", want.String()))
}
