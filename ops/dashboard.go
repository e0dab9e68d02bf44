package ops

import (
	"bytes"
	"embed"
	"net/http"
	"path"
	"time"
)

// dashboardFiles are the files of the dashboard. uplot.js, uplot.css and uplot.LICENSE are those of
// uPlot 1.6.32 (npm), unchanged.
//
//go:embed dashboard
var dashboardFiles embed.FS

// dashboardPolicy lets the dashboard load from, and ask, nothing but the hub that serves it.
const dashboardPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// dashboard serves the page of the dashboard, which holds no data, and its files.
func (s *Server) dashboard(w http.ResponseWriter, r *http.Request) {
	name := "index.html"
	if r.URL.Path != "/" {
		name = path.Base(r.URL.Path)
	}
	content, err := dashboardFiles.ReadFile("dashboard/" + name)
	if err != nil {
		writeError(w, http.StatusNotFound, "not_found", "There is nothing at this path.")
		return
	}
	h := w.Header()
	h.Set("Content-Security-Policy", dashboardPolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-cache")
	http.ServeContent(w, r, name, time.Time{}, bytes.NewReader(content))
}
