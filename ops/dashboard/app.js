// The dashboard of a hub: which view is shown, and when it asks again.

import { $, el, say, settled, updateChildren } from "./dom.js";
import { Refused, askForToken, onChange, refusal, showToken } from "./hub.js";
import { connections, nats, outbox, projections } from "./system.js";
import { events, state } from "./events.js";
import { group, groups } from "./groups.js";
import { letters } from "./letters.js";
import { overview } from "./overview.js";
import { firstPages } from "./pages.js";
import { endPlots, forgetTotals } from "./plot.js";
import { topic, topics } from "./topics.js";

const POLL_MS = 2000; // how often the view that is shown asks again, unless it says otherwise
// Slow answers are asked for less often: an open page waits this many times as long as the last
// answer took, and at most MAX_POLL_MS.
const REST = 40;
const MAX_POLL_MS = 5000;

const views = { "": overview, topics, groups, "dead-letters": letters, events, state, connections, outbox, projections, nats };

function parse() {
  const [name = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return [Object.hasOwn(views, name) ? name : "", ...rest.filter((part) => part !== "")];
}

function viewOf([name, first, second]) {
  if (name === "topics" && first) return topic;
  if (name === "groups" && first && second) return group;
  return views[name];
}

let shownHash; // the route whose view is on the page
let timer;
let loading;

/** show asks the hub for the view of the address, and shows the answer. */
async function show() {
  clearTimeout(timer);
  loading?.abort();
  const mine = new AbortController();
  loading = mine;
  const route = parse();
  const view = viewOf(route);
  const { hash } = location; // it may change before the browser says so
  const fresh = shownHash !== hash;
  if (fresh) {
    endPlots();
    if (shownHash !== undefined) firstPages();
    renderNav(route[0]);
    document.title = `${view.title} – eventhub`;
    $("main").setAttribute("aria-busy", "true");
  }
  const began = performance.now();
  let took = 0;
  try {
    const data = await view.load(route, AbortSignal.any([mine.signal, AbortSignal.timeout(20000)]));
    if (loading !== mine) return;
    took = performance.now() - began;
    draw(view, view.render(data, route), fresh, hash);
    reachable(true);
  } catch (err) {
    if (loading !== mine) return;
    if (err instanceof Refused) {
      reachable(true);
      endPlots();
      draw(view, refusal(err), fresh, hash);
    } else if (err instanceof TypeError || err instanceof DOMException) { // fetch failed, or took too long
      reachable(false);
    } else {
      throw err;
    }
  } finally {
    if (loading === mine) {
      const away = !$("gone").hidden;
      if (!view.once || away) timer = setTimeout(() => (document.hidden ? wait() : show()), away ? POLL_MS : Math.max(view.every ?? POLL_MS, Math.min(MAX_POLL_MS, REST * took)));
    }
  }
}

/** wait asks again when the page is visible again. */
function wait() {
  document.addEventListener("visibilitychange", () => show(), { once: true });
}

/** draw shows the view of a hash. What stays on the page keeps focus, scrolling and selection. */
function draw(view, nodes, fresh, hash) {
  const main = $("main");
  const all = [nodes].flat(Infinity).filter((n) => n !== null && n !== undefined && n !== false);
  if (!all.some((n) => n.tagName === "H1")) all.unshift(el("h1", {}, view.title));
  if (fresh) {
    main.replaceChildren(...all.map(settled));
    main.removeAttribute("aria-busy");
    performance.mark("shown");
    if (shownHash !== undefined) main.focus({ preventScroll: true });
    scrollTo(0, 0);
  } else {
    updateChildren(main, all);
  }
  shownHash = hash;
}

/** reachable says whether the hub answers. */
function reachable(does) {
  const gone = $("gone");
  if (does && !gone.hidden) {
    forgetTotals();
    say("The hub answers again.");
  }
  gone.hidden = does;
  gone.textContent = does ? "" : "The hub does not answer. This page tries again every 2 seconds; what it shows is old.";
  $("main").classList.toggle("old", !does);
}

function renderNav(current) {
  const links = Object.entries(views).map(([name, view]) => el("a", { href: `#/${name}`, "aria-current": name === current ? "page" : undefined }, view.title));
  $("nav").replaceChildren(...links);
  showCurrent();
}

/** showCurrent scrolls the names of the views to the present one. */
function showCurrent() {
  const current = $("nav").querySelector("[aria-current]");
  if (current) $("nav").scrollLeft = current.offsetLeft - ($("nav").clientWidth - current.offsetWidth) / 2;
}

const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
$("times").textContent = `Times are by this browser (${zone}); the title of a time has UTC. Figures come from the hub that serves this page.`;
$("token").addEventListener("click", askForToken);
document.querySelector(".skip").addEventListener("click", (e) => {
  e.preventDefault(); // the address names the view
  $("main").focus();
});
addEventListener("hashchange", () => show());
addEventListener("resize", showCurrent);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { endPlots(); show(); });
onChange(show);
showToken();
show();
