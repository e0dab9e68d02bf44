// The overview, and what a first visitor sees.

import { bytes, button, copied, count, counted, el, none, perSecond, span, state, table, tile, tiles, when } from "./dom.js";
import { ask, askForToken, maybe, token } from "./hub.js";
import { plotted, rate, record } from "./plot.js";

export const overview = {
  title: "Overview",
  async load(_, signal) {
    const o = await ask(["overview"], { signal });
    const quiet = !o.totals.events_published_total && !o.totals.events_delivered_total;
    o.empty = quiet && !(token() && (await maybe(["topics"], { signal })).topics?.some((t) => t.topic && t.events > 0));
    return o;
  },
  render(o) {
    const t = o.totals;
    const published = rate("published", t.events_published_total ?? 0);
    const delivered = rate("delivered", t.events_delivered_total ?? 0);
    const acked = rate("acked", t.events_acked_total ?? 0);
    record("inflight", t.events_inflight ?? 0);
    return [
      o.empty ? firstSteps(o.addresses) : null,
      tiles(Object.entries(o.checks).map(([name, is]) => tile(name, state(is, is === "ok" ? "good" : "bad"), `The check ${name} of /readyz`)),
        tile("up for", span(o.now - o.started), `Since ${new Date(o.started).toISOString()}`), tile("version", o.version ?? none, "The version of the hub")),
      el("h2", {}, "Events through this hub"),
      tiles(tile("published", perSecond(published), "Events that clients of this hub published, per second"), tile("delivered", perSecond(delivered), "Deliveries to members on this hub, per second; each attempt counts"),
        tile("acknowledged", perSecond(acked), "Events that members on this hub acknowledged, per second"), tile("in flight", counted(t.events_inflight ?? 0, "event"), "Events that members on this hub hold"),
        tile("connections", count(t.eventhub_connections), "Open WebSocket connections"), tile("subscriptions", count(t.eventhub_subscriptions), "Open subscriptions"),
        tile("dead letters made", counted(t.events_dead_lettered_total ?? 0, "event"), "Events that failed too often, since the hub started"), tile("errors sent", count(t.eventhub_errors_total ?? 0), "ERR frames and HTTP errors, since the hub started")),
      el("div", { class: "plots" },
        plotted("Events per second", [["published", "published"], ["delivered", "delivered"], ["acked", "acknowledged"]], perSecond),
        plotted("Events in flight", [["inflight", "in flight"]])),
      el("h2", {}, el("a", { href: "#/nats" }, "NATS")), natsTiles(o.nats),
      el("h2", {}, el("a", { href: "#/outbox" }, "Outbox")), outboxTable(o.outboxes),
      el("h2", {}, el("a", { href: "#/projections" }, "Projections")), projectionTable(o.projections),
    ];
  },
};

function natsTiles(n) {
  if (!n) return el("p", { class: "bad" }, "NATS does not answer.");
  return tiles(tile("server", n.server || none, "The server that the hub is connected to"), tile("version", n.version, "Of the NATS server"), tile("cluster", n.cluster || "none", "The cluster of the server"),
    tile("connections up", `${n.connected} of ${n.connections}`, "Connections of the hub to NATS"), tile("round trip", span(n.roundTripMs), "Time of a question to NATS and its answer"),
    tile("streams", count(n.streams), "Streams of the account"), tile("consumers", count(n.consumers), "Consumers of the account"),
    tile("on disk", bytes(n.fileBytes), "Storage in use by streams"), tile("disk left", n.fileLeft === undefined ? "not known" : bytes(n.fileLeft), "What the limit of the account, or the disk, has left"),
    tile("in memory", bytes(n.memoryBytes), "Memory in use by streams"), tile("failed requests", count(n.errors), "Requests to JetStream that failed, of all programs of the account"));
}

export const outboxTable = (all) => table("Outboxes of this hub", [
  ["outbox", (o) => el("a", { href: `#/outbox/${o.outbox}` }, o.outbox)],
  ["state", (o) => (o.waiting ? state("waits for its database", "bad") : state("ok", "good"))],
  ["waiting", (o) => counted(o.pending, "event"), "n", "Records that wait, or are being published"],
  ["parked", (o) => el("span", { class: o.parked ? "bad" : "" }, counted(o.parked, "event")), "n", "Records that were given up"],
  ["oldest", (o) => span(o.oldestAgeMs), "n", "How long ago the oldest record that waits was added"],
  ["published", (o) => counted(o.published, "event"), "n", "Since the hub started"],
  ["failed tries", (o) => count(o.failures), "n", "Since the hub started"],
], all, "This hub has no outbox.", (o) => o.outbox);

export const projectionTable = (all) => table("Projections of this hub", [
  ["projection", (p) => p.projection],
  ["state", (p) => (p.stalledMs ? state(`no progress for ${span(p.stalledMs)}`, "bad") : state("ok", "good"))],
  ["rate", (p) => perSecond(rate(`projected ${p.projection}`, Object.values(p.events).reduce((sum, n) => sum + n, 0))), "n", "Events per second"],
  ["applied", (p) => counted(p.events.applied ?? 0, "event"), "n", "Events that changed a state"],
  ["known", (p) => counted(p.events.known ?? 0, "event"), "n", "Events that were applied before"],
  ["poisoned", (p) => el("span", { class: p.events.poisoned ? "bad" : "" }, counted(p.events.poisoned ?? 0, "event")), "n", "Events that the projection cannot read"],
  ["dropped", (p) => el("span", { class: p.events.dropped ? "bad" : "" }, counted(p.events.dropped ?? 0, "event")), "n", "Events dropped because the topic of the states takes no more keys"],
], all, "No projection has run on this hub.", (p) => p.projection);

/** quoted is a word for a shell. */
const quoted = (text) => (/^[\w.:/@%+=,-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** reached is an address as the visitor reaches it. */
function reached(address, otherwise) {
  if (!address) return otherwise;
  const [, scheme, rest] = /^(\w+:\/\/)(.*)$/.exec(address) ?? [undefined, "", address];
  return rest.startsWith(":") ? `${scheme}${location.hostname}${rest}` : address;
}

/** firstSteps shows a first visitor what to do. */
function firstSteps(addresses) {
  const http = reached(addresses?.http, `http://${location.hostname}:8081`);
  const ws = reached(addresses?.websocket, `ws://${location.hostname}:8090`);
  const at = ws === "ws://127.0.0.1:8090" ? "" : ` --url=${quoted(ws)}`;
  const own = token() ? `EVENTHUB_TOKEN=${quoted(token())} ` : "";
  const bearer = token() ? `'Authorization: Bearer ${token().replaceAll("'", "'\\''")}'` : '"Authorization: Bearer $(cat eventhub-data/token)"';
  const commands = [
    ["Listen to a topic in a terminal. The command waits for events:", `${own}eventhub sub hello --group=me${at}`],
    ["Publish an event from a second terminal:", `${own}eventhub pub hello '{"n":1}'${at}`],
    ["Or publish over HTTP:", `curl -H ${bearer} -d '{"n":2}' ${quoted(http)}/publish/hello`],
  ];
  return el("section", { class: "steps", "aria-label": "First steps" }, el("h2", {}, "This hub is empty. Try it:"),
    el("ol", {},
      token()
        ? el("li", {}, el("p", {}, "This tab has a token. The commands below contain it, so keep them to yourself."))
        : el("li", {}, el("p", {}, "Give this page the hub's token. The hub printed it when it first started, and keeps it in its data directory. The commands below then contain it."),
          el("div", { class: "command" }, el("pre", { tabindex: "0" }, "cat eventhub-data/token"), copy("cat eventhub-data/token", "the command that shows the token")), button("Set the token", askForToken, "main")),
      commands.map(([what, command]) => el("li", {}, el("p", {}, what), el("div", { class: "command" }, el("pre", { tabindex: "0" }, command), copy(command, what)))),
      el("li", {}, el("p", {}, "Then look at ", el("a", { href: "#/events/hello" }, "the events of hello"), ", where you can also publish from this page."))));
}

function copy(command, what) {
  const b = button("Copy", () => copied(command));
  b.setAttribute("aria-label", `Copy: ${what}`);
  return b;
}
