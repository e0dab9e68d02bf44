// Connections, outboxes, projections and NATS.

import { button, buttons, bytes, confirmed, count, counted, el, field, groupLink, none, note, options, shown, span, state, table, tile, tiles, topicLink, when } from "./dom.js";
import { Refused, act, ask, maybe, refusal } from "./hub.js";
import { outboxTable, projectionTable } from "./overview.js";
import { PAGE, at, pager, restart } from "./pages.js";
import { plotted, record } from "./plot.js";

export const connections = {
  title: "Connections",
  load: (_, signal) => ask(["connections"], { query: { limit: PAGE, next: at("connections") }, signal }),
  render: (o) => [
    note("WebSocket connections of this hub, streams of server-sent events, and pulls that wait or have unsettled events, oldest first."),
    table("Connections", [
      ["principal", (c) => c.principal ?? el("span", { class: "soft" }, "none yet"), "", "Whose token it is"], ["kind", (c) => c.kind], ["address", (c) => c.remote], ["connected for", (c) => span(o.now - c.since), "n"],
      ["queued", (c) => bytes(c.queuedBytes), "n", "Bytes that wait to be sent"],
      ["subscriptions", (c) => (c.subscriptions.length ? c.subscriptions.map((s) => el("div", {}, groupLink(s.topic, s.group), " on ", topicLink(s.topic),
        `: ${count(s.inFlight)} of ${count(s.maxInFlight)} in flight, credit ${count(Math.max(0, s.maxInFlight - s.inFlight))}${s.paused ? ", paused" : ""}`)) : none), "text"],
      ["", (c) => button("Close…", async () => {
        if (await confirmed("Close", `Closes the connection of ${c.principal ?? c.remote}. Its client may connect again.`, "Close the connection")) act("Close", () => ask(["connections", c.id], { method: "DELETE" }).then(() => `Closed the connection of ${c.principal ?? c.remote}.`));
      }, "danger"), "do"],
    ], o.connections, "Nobody is connected.", (c) => c.id),
    pager("connections", o.next),
  ],
};

let status = "error"; // of the records that are shown

export const outbox = {
  title: "Outbox",
  load: async ([, name], signal) => {
    const { outboxes } = await ask(["overview"], { signal });
    const chosen = name ?? outboxes[0]?.outbox;
    return { outboxes, chosen, list: chosen ? await maybe(["outboxes", chosen], { query: { status, limit: PAGE, after: at("outbox") }, signal }) : null };
  },
  render({ outboxes, chosen, list }) {
    const figures = outboxes.find((o) => o.outbox === chosen);
    if (figures) record(`outbox ${chosen}`, figures.pending);
    const choose = el("select", { name: "status", onchange: (e) => { status = e.target.value; restart("outbox"); act("Records", async () => `Showing records that are ${e.target.selectedOptions[0].text}.`); } },
      options([["error", "parked"], ["pending", "waiting"], ["claimed", "being published"], ["sent", "published"]], status));
    return [
      outboxTable(outboxes),
      figures ? el("div", { class: "plots one" }, plotted(`Events that wait in the outbox ${chosen}`, [[`outbox ${chosen}`, "waiting"]])) : null,
      chosen ? [el("h2", {}, `Records of ${chosen}`), records(chosen, list, choose, figures)] : null,
    ];
  },
};

function records(box, list, choose, figures) {
  if (list instanceof Refused) {
    return list.status === 404 ? note("The hub has not opened this outbox yet: nothing was posted, or its database does not answer.") : refusal(list);
  }
  return [
    el("div", { class: "row" }, field("Records that are", choose),
      status === "error" && figures?.parked ? button("Retry all parked…", () => retry(box, { all: 1 }, `all ${counted(figures.parked, "parked record")}`)) : null),
    table(`Records of ${box}`, [
      ["id", (r) => el("code", {}, r.id), "id"], ["topic", (r) => topicLink(r.topic)], ["key", (r) => r.key ?? none], ["added", (r) => when(r.addedTs)],
      ["attempts", (r) => count(r.attempts), "n", "Tries that failed"], ["last error", (r) => r.err ?? none, "text"],
      ["next try", (r) => (r.status === "error" ? "none" : when(r.nextTs || undefined))],
      ["", (r) => [button("Show", () => shown("Record", r)), r.status === "error" ? [" ", button("Retry…", () => retry(box, { id: r.id }, `the record ${r.id}`)), " ",
        button("Discard…", () => discard(box, r), "danger")] : null], "do"],
    ], list.records, "There are none.", (r) => `${r.topic} ${r.id}`),
    pager("outbox", list.more ? String(list.records.at(-1).sequence) : undefined),
  ];
}

async function retry(box, query, what) {
  if (await confirmed("Retry", `Publishes ${what} again, with the attempts at 0.`, "Retry")) act("Retry", async () => `${counted((await ask(["outboxes", box, "retry"], { method: "POST", query })).done, "record")} of ${box} will be published again.`);
}

async function discard(box, r) {
  if (await confirmed("Discard", `Removes the record ${r.id} for ${r.topic} for good: its event is never published.`, "Discard", r.id)) {
    act("Discard", async () => `Removed ${counted((await ask(["outboxes", box, "discard"], { method: "POST", query: { topic: r.topic, id: r.id } })).done, "record")} of ${box}.`);
  }
}

const OWN = ["heartbeat.received", "process-projector"]; // the topic and the group of the hub's own projector

export const projections = {
  title: "Projections",
  load: async (_, signal) => {
    const [o, own] = await Promise.all([ask(["overview"], { signal }), maybe(["groups", ...OWN], { signal })]);
    return { o, own: own instanceof Refused ? null : own };
  },
  render({ o, own }) {
    if (own) record("projector behind", own.pending + own.inflight);
    return [
      projectionTable(o.projections),
      tiles(tile("snapshots written", count(o.totals.eventhub_snapshots_total ?? 0), "Keys that compactors wrote, since the hub started"), tile("projector", o.checks.projector ? state(o.checks.projector, o.checks.projector === "ok" ? "good" : "bad") : "does not run here", "The check projector of /readyz")),
      own ? [el("h2", {}, "The hub's projector of ", topicLink(OWN[0])),
        tiles(tile("behind", counted(own.pending + own.inflight, "event"), "Events that are not projected yet, by all hubs"), tile("oldest", own.oldestUnackedMs ? span(own.oldestUnackedMs) : none, "How long ago the oldest of them was stored"), tile("group", groupLink(...OWN), "The group that reads the events")),
        el("div", { class: "plots one" }, plotted("Events that the projector is behind", [["projector behind", "events"]])),
        el("p", {}, el("a", { href: "#/state" }, "The states that it projects"))] : null,
    ];
  },
};

export const nats = {
  title: "NATS",
  every: 5000,
  load: async (_, signal) => {
    const [o, n] = await Promise.all([ask(["overview"], { signal }), ask(["nats"], { query: { limit: PAGE, next: at("nats") }, signal })]);
    return { o, n };
  },
  render({ o, n }) {
    record("round trip", o.nats?.roundTripMs ?? 0);
    record("on disk", n.file.bytes);
    return [
      tiles(tile("cluster", o.nats?.cluster || "none", "The cluster of the server that the hub is connected to"), tile("servers", count(n.servers.length), "Servers that have streams of the account"), tile("streams", count(n.total), "Streams of the account"),
        tile("on disk", used(n.file), "Storage in use by streams, counted once"), tile("disk left", left(n.file), "What the limit of the account, or the disk, has left"),
        tile("in memory", used(n.memory), "Memory in use by streams"), tile("memory left", left(n.memory), "What the limit of the account has left"),
        tile("round trip", span(o.nats?.roundTripMs), "Time of a question to NATS and its answer")),
      el("div", { class: "plots" }, plotted("Time of a question to NATS and its answer", [["round trip", "round trip"]], span), plotted("Storage in use by streams", [["on disk", "on disk"]], bytes)),
      el("h2", {}, "Servers"),
      table("Servers", [
        ["server", (s) => s.server], ["leads", (s) => counted(s.leads, "stream"), "n", "Streams whose writes the server takes"], ["has", (s) => counted(s.copies, "copy").replace(/copys$/, "copies"), "n", "Streams that the server stores"],
        ["stores", (s) => bytes(s.bytes), "n", "Bytes of these streams"], ["state", (s) => (s.offline ? state(`offline: ${counted(s.offline, "stream")}`, "bad") : s.behind ? state(`behind: ${counted(s.behind, "stream")}`, "bad") : state("up to date", "good"))],
      ], n.servers, "None is known.", (s) => s.server),
      el("h2", {}, "Streams"),
      table("Streams", [
        ["stream", (s) => (s.topic ? topicLink(s.topic) : s.stream)], ["leader", (s) => s.leader ?? state("none", "bad"), "", "The server that takes writes"],
        ["replicas", (s) => `${count(s.copies.filter((c) => c.current && !c.offline).length)} of ${count(s.replicas)}`, "n", "Copies that are up to date, and those that there should be"],
        ["copies", (s) => s.copies.filter((c) => c.server !== s.leader).map((c) => el("div", {}, c.server, " ", c.offline ? state("offline", "bad") : c.current ? state("current", "good") : state(`${count(c.lag)} behind`, "bad"))), "", "Copies beside the leader's"],
        ["storage", (s) => s.storage], ["messages", (s) => count(s.events), "n"], ["size", (s) => bytes(s.bytes), "n", "Counted once"], ["consumers", (s) => count(s.consumers), "n", "Those of groups included"],
      ], n.streams, "There are none.", (s) => s.stream),
      pager("nats", n.next),
    ];
  },
};

/** used is the use of a storage, with a bar where there is a bound. */
function used(s) {
  const bound = s.left === undefined ? 0 : s.bytes + s.left;
  return [bytes(s.bytes), bound ? el("meter", { min: 0, max: bound, high: bound * 0.8, value: s.bytes, "aria-label": "Share in use" }) : null];
}

const left = (s) => (s.left === undefined ? "no limit known" : bytes(s.left));
