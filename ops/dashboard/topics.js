// Topics.

import { bytes, button, buttons, confirmed, count, counted, dialog, el, enc, field, groupLink, none, note, perSecond, say, span, state, table, tile, tiles, topicLink, when } from "./dom.js";
import { act, ask } from "./hub.js";
import { groupTable } from "./groups.js";
import { PAGE, cut, pager, restart } from "./pages.js";
import { plotted, record } from "./plot.js";

let wanted = ""; // the filter of the list

export const topics = {
  title: "Topics",
  load: (_, signal) => ask(["topics"], { signal }),
  render(o) {
    const all = o.topics.filter((t) => `${t.topic ?? ""} ${t.stream}`.includes(wanted));
    const page = cut("topics", all);
    const filter = el("form", { class: "row", role: "search", onsubmit: (e) => { e.preventDefault(); wanted = new FormData(e.target).get("name"); restart("topics"); act("Find", async () => `Found ${counted(o.topics.filter((t) => `${t.topic ?? ""} ${t.stream}`.includes(wanted)).length, "topic")}.`); } },
      field("Name contains", el("input", { name: "name", value: wanted, autocomplete: "off" })), el("button", { type: "submit" }, "Find"));
    return [
      filter, note(`${counted(all.length, "topic")}${wanted ? ` of ${count(o.topics.length)}` : ""}.`),
      table("Topics", [
        ["topic", (t) => [t.topic ? topicLink(t.topic) : [t.stream, " ", state("family", "")], t.drift ? [" ", el("span", { class: "mark bad", title: t.drift.join("; ") }, "differs from its rule")] : null]],
        ["events", (t) => count(t.events), "n", "Events that are stored"],
        ["rate", (t) => perSecond(t.rate), "n", "Events stored per second, through all hubs"],
        ["size", (t) => bytes(t.bytes), "n", "Bytes on the servers, counted once"],
        ["oldest", (t) => when(t.firstTs), "", "When the oldest event was stored"],
        ["newest", (t) => when(t.lastTs), "", "When the newest event was stored"],
        ["keeps", (t) => keeps(t.retention), "", "The bounds of the topic"],
        ["when full", (t) => t.onFull, "", "drop removes the oldest events; reject refuses new ones"],
        ["compacted", (t) => (t.compacted ? el("a", { href: `#/state/${enc(t.topic)}` }, "yes") : "no"), "", "Whether the newest event of each key stays"],
      ], page.rows, "There are no topics yet, or the token shows none.", (t) => t.stream),
      pager("topics", page.next),
    ];
  },
};

function keeps(r) {
  const parts = [];
  if (r?.ageMs) parts.push(span(r.ageMs));
  if (r?.bytes > 0) parts.push(bytes(r.bytes));
  if (r?.messages > 0) parts.push(`${count(r.messages)} events`);
  return parts.join(", ") || "everything";
}

export const topic = {
  title: "Topic",
  load: async (route, signal) => {
    const [t, groups] = await Promise.all([ask(["topics", route[1]], { signal }), ask(["groups"], { query: { topic: route[1], limit: PAGE }, signal })]);
    return { t, groups };
  },
  render({ t, groups }) {
    const name = t.topic;
    record(`events of ${name}`, t.events);
    return [
      el("h1", {}, name),
      tiles(tile("events", count(t.events), "Events that are stored"), tile("size", bytes(t.bytes), t.family ? "Bytes of the whole family" : "Bytes on the servers, counted once"),
        tile("oldest", when(t.first?.ts), "When the oldest event was stored"), tile("newest", when(t.last?.ts), "When the newest event was stored"),
        tile("keeps", keeps(t.retention), "The bounds of the topic"), tile("when full", t.onFull, "drop removes the oldest events; reject refuses new ones"), tile("groups", count(t.groups), "Groups of the topic"),
        tile("replicas", count(t.replicas), "Servers that store the topic"), tile("compacted", t.compacted ? "yes" : "no", "Whether the newest event of each key stays")),
      t.needed ? note(`The hub itself needs this topic: ${t.needed}.`) : null,
      buttons(
        el("a", { class: "button", href: `#/events/${enc(name)}` }, "Events"),
        t.compacted ? el("a", { class: "button", href: `#/state/${enc(name)}` }, "Latest by key") : null,
        el("a", { class: "button", href: `#/dead-letters/${enc(name)}` }, "Dead letters"),
        button("Purge…", () => purge(name), "danger"), button("Delete…", () => deleteTopic(name), "danger")),
      el("div", { class: "plots" }, plotted(`Stored events of ${name}`, [[`events of ${name}`, "events"]])),
      el("h2", {}, "Groups"), groupTable(groups.groups), groups.next ? el("p", {}, el("a", { href: `#/groups/${enc(name)}` }, "All groups of this topic")) : null,
      (t.lost ?? []).length ? [el("h2", {}, "Lost to retention"), table("Lost events", [["group", (l) => groupLink(name, l.group)], ["events", (l) => count(l.events), "n", "Events that were removed before the group was given them"], ["found", (l) => when(l.ts)]], t.lost, none, (l) => l.group)] : null,
    ];
  },
};

async function purge(name) {
  const values = await dialog(`Purge ${name}`, [
    el("p", {}, "Removes stored events for good. Groups that have not got them lose them."),
    field("Stored before (leave empty for all events)", el("input", { name: "before", type: "datetime-local", step: "1" })),
  ], { yes: "Look" });
  if (!values) return;
  const body = values.before ? { before_ts: new Date(values.before).getTime() } : { all: true };
  try { // what comes after the look stays
    const would = await ask(["topics", name, "purge"], { method: "POST", body: { ...body, dry_run: true } });
    if (!(await confirmed(`Purge ${name}`, `Remove ${counted(would.removed, "event")}; ${count(would.left)} stay.`, "Purge", name))) return;
    body.bound = would.bound;
  } catch (err) {
    say(`Purge: ${err.message}`, true);
    return;
  }
  act("Purge", async () => {
    const did = await ask(["topics", name, "purge"], { method: "POST", body });
    return `Removed ${counted(did.removed, "event")} of ${name}; ${count(did.left)} are left.`;
  });
}

async function deleteTopic(name) {
  if (!(await confirmed(`Delete ${name}`, "Removes the topic with all its events and groups.", "Delete", name))) return;
  await act("Delete", async () => {
    await ask(["topics", name], { method: "DELETE" });
    location.hash = "#/topics";
    return `Deleted ${name}.`;
  });
}
