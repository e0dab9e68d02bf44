//go:build unix

package main

import (
	"context"
	"flag"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/sdk/go/wire"
)

var dashboardGroups = flag.Int("dashboard.groups", 0, "measure the dashboard with so many groups: how soon a view is there, and what it costs the hub in a minute")

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
				sub, err := c.Subscribe(ctx, topic, fmt.Sprintf("group-%05d", i), wire.SubscribeOptions{From: "earliest"}, func(wire.Event) {})
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
	if _, err := n.dial().Publish(ctx, topic, []byte(`{"n":1}`), wire.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
}

// The list of groups comes in pages, which go on and back. With -dashboard.groups, there are so
// many groups, and each view is measured for a minute.
func TestDashboardOfManyGroups(t *testing.T) {
	t.Parallel()
	hub := startNode(t, "--data="+t.TempDir())
	groups := max(150, *dashboardGroups)
	manyGroups(t, hub, "orders.placed", groups)
	b := openBrowser(t)
	b.open(hub.ops, "")
	b.eval(`sessionStorage.setItem("token", "` + nodeToken + `")`)
	b.open(hub.ops, "groups")
	rows := func(n int, first string) {
		t.Helper()
		b.until(fmt.Sprintf("%d groups from %s on are shown", n, first), fmt.Sprintf(`document.querySelectorAll(".wide tbody tr").length === %d && document.querySelector(".wide tbody td").innerText.trim() === %q`, n, first))
	}
	rows(100, "group-00000")
	b.click("Next page")
	rows(min(100, groups-100), "group-00100")
	b.click("Previous page")
	rows(100, "group-00000")
	b.until("each group says how far it is behind", `[...document.querySelectorAll(".wide tbody tr")].every((r) => r.innerText.includes("1 event"))`)
	b.until("the plot of the groups that are furthest behind is drawn", `document.querySelectorAll("canvas").length === 1`)
	b.until("the lag of a group over time is drawn", `document.querySelector(".spark polyline").getAttribute("points").includes(" ")`)
	if *dashboardGroups == 0 {
		return
	}
	process, err := psutil.NewProcess(int32(hub.cmd.Process.Pid))
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
	// share is the part of a core that the hub takes in a minute.
	share := func() float64 {
		t.Helper()
		before, began := cpu(), time.Now()
		<-time.After(time.Minute)
		return 100 * (cpu() - before) / time.Since(began).Seconds()
	}
	b.do(chromedp.Navigate("about:blank"))
	alone := share()
	for _, view := range []string{"", "groups", "groups/orders.placed/group-00000", "topics", "nats"} {
		b.do(chromedp.Navigate("about:blank"))
		b.open(hub.ops, view)
		b.until("the view is shown", `document.querySelector("main .tile, main .wide td") && !document.getElementById("main").ariaBusy`)
		// By the clock of the page, from when it was asked for until all of the view was there.
		ms, err := strconv.ParseFloat(b.eval(`performance.getEntriesByName("shown")[0].startTime`), 64)
		if err != nil {
			t.Fatal(err)
		}
		came := time.Duration(ms * float64(time.Millisecond))
		more := share() - alone
		t.Logf("%d groups, view %q: shown after %v; costs %.2f %% of a core beside the %.2f %% of the hub alone", groups, view, came.Round(time.Millisecond), more, alone)
		if came > time.Second {
			t.Errorf("the view %q came after %v", view, came)
		}
		if more > 5 {
			t.Errorf("the open view %q costs %.2f %% of a core", view, more)
		}
	}
}
