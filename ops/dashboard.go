package ops

import (
	"bytes"
	"embed"
	"net/http"
	"path"
	"strings"
	"time"
)

// dashboardFiles are the files of the dashboard. uplot.js, uplot.css and uplot.LICENSE are those of
// uPlot 1.6.32 (npm), unchanged.
//
//go:embed dashboard
var dashboardFiles embed.FS

// pagePolicy lets a page of the hub load from, and ask, nothing but the port that serves it.
const pagePolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// dashboard serves the page of the dashboard, which holds no data, and its files.
func (s *Server) dashboard(w http.ResponseWriter, r *http.Request) {
	ServePage(w, r, dashboardFiles, "dashboard")
}

// ServePage serves a page of the hub: index.html of a directory for a path that ends with a slash,
// and its other files by the last segment of the path.
func ServePage(w http.ResponseWriter, r *http.Request, files embed.FS, dir string) {
	name := "index.html"
	if !strings.HasSuffix(r.URL.Path, "/") {
		name = path.Base(r.URL.Path)
	}
	content, err := files.ReadFile(dir + "/" + name)
	if err != nil {
		writeError(w, http.StatusNotFound, "not_found", "There is nothing at this path.")
		return
	}
	h := w.Header()
	h.Set("Content-Security-Policy", pagePolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-cache")
	http.ServeContent(w, r, name, time.Time{}, bytes.NewReader(content))
}
