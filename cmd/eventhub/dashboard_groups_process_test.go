//go:build unix

package main

import (
	"context"
	"flag"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/facade/client"
)

var dashboardGroups = flag.Int("dashboard.groups", 0, "measure the dashboard with so many groups: how soon it is there, and how much CPU it takes in a minute")

// manyGroups makes groups of a topic, and publishes an event that none of them has settled.
func manyGroups(t *testing.T, n *node, topic string, groups int) {
	t.Helper()
	const makers = 4
	var wg sync.WaitGroup
	for maker := range makers {
		c := n.dial()
		wg.Go(func() {
			for i := maker; i < groups; i += makers {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				sub, err := c.Subscribe(ctx, topic, fmt.Sprintf("group-%05d", i), client.SubscribeOptions{From: "earliest"}, func(client.Event) {})
				if err == nil {
					err = sub.Unsubscribe(ctx)
				}
				cancel()
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := n.dial().Publish(ctx, topic, []byte(`{"n":1}`), client.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
}

// The list of groups comes in pages, which go on and back.
func TestDashboardPagesGroups(t *testing.T) {
	t.Parallel()
	hub := startNode(t, "--data="+t.TempDir())
	manyGroups(t, hub, "orders.placed", 150)
	b := openBrowser(t)
	b.open(hub.ops, "")
	b.eval(`sessionStorage.setItem("token", ` + "'" + nodeToken + `')`)
	b.open(hub.ops, "groups")
	rows := func(n int, first string) {
		t.Helper()
		b.until(fmt.Sprintf("%d groups from %s on are shown", n, first), fmt.Sprintf(`document.querySelectorAll("tbody tr").length === %d && document.querySelector("tbody td").innerText.trim() === %q`, n, first))
	}
	rows(100, "group-00000")
	b.click("Next page")
	rows(50, "group-00100")
	b.click("Previous page")
	rows(100, "group-00000")
	b.until("each group says how far it is behind", `[...document.querySelectorAll("tbody tr")].every((r) => r.innerText.includes("1 event"))`)
	b.until("the plot of the groups that are furthest behind is drawn", `document.querySelectorAll("canvas").length === 1`)
	b.until("the lag of a group over time is drawn", `document.querySelector(".spark polyline").getAttribute("points").includes(" ")`)
}

// BenchmarkDashboard is not one: a page of groups is opened once, and watched for a minute.
func TestDashboardOfManyGroups(t *testing.T) {
	if *dashboardGroups == 0 {
		return // task bench:dashboard
	}
	hub := startNode(t, "--data="+t.TempDir())
	manyGroups(t, hub, "orders.placed", *dashboardGroups)
	process, err := psutil.NewProcess(int32(hub.cmd.Process.Pid)) //nolint:gosec // a process id
	if err != nil {
		t.Fatal(err)
	}
	cpu := func() float64 {
		t.Helper()
		times, err := process.Times()
		if err != nil {
			t.Fatal(err)
		}
		return times.User + times.System
	}
	// share is the part of a core that the hub takes in a while.
	share := func(during time.Duration) float64 {
		t.Helper()
		before, began := cpu(), time.Now()
		<-time.After(during)
		return 100 * (cpu() - before) / time.Since(began).Seconds()
	}
	idle := share(time.Minute)
	b := openBrowser(t)
	b.open(hub.ops, "")
	b.eval(`sessionStorage.setItem("token", '` + nodeToken + `')`)
	for _, view := range []string{"", "groups", "groups/orders.placed/group-00000", "topics", "nats"} {
		b.do(chromedp.Navigate("about:blank"))
		at, err := url.JoinPath(hub.ops, "/")
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		b.do(chromedp.Navigate(at + "#/" + view))
		b.until("the view is shown", `document.querySelector("main .tile, main tbody td") && !document.getElementById("main").ariaBusy`)
		came := time.Since(began)
		// from the start of the navigation until a frame with the view was painted, by the page's own clock
		painted := b.eval(`new Promise((r) => requestAnimationFrame(() => setTimeout(() => r(Math.round(performance.getEntriesByName("shown").at(0)?.startTime ?? -1)))))`)
		open := share(time.Minute)
		t.Logf("%d groups, view %q: shown after %v (by the page's clock: %s ms); the hub takes %.2f %% of a core, without the page %.2f %%", *dashboardGroups, view, came.Round(time.Millisecond), painted, open, idle)
		if came > time.Second && !strings.Contains(view, "/") {
			t.Errorf("the view %q came after %v", view, came)
		}
		if open-idle > 5 {
			t.Errorf("the open view %q costs %.2f %% of a core", view, open-idle)
		}
	}
}
