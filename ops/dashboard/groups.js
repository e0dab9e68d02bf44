// Groups, with their lag over time.

import { button, buttons, bytes, confirmed, count, counted, dialog, el, enc, field, groupLink, none, note, options, say, span, state, table, tile, tiles, topicLink, when } from "./dom.js";
import { Refused, act, ask, maybe } from "./hub.js";
import { PAGE, at, pager } from "./pages.js";
import { plotted, record, spark } from "./plot.js";

const lag = (g) => `${g.topic} ${g.group} lag`;
const unsettled = (g) => g.pending + g.inflight;

export function groupTable(rows) {
  for (const g of rows) record(lag(g), unsettled(g));
  return table("Groups", [
    ["group", (g) => groupLink(g.topic, g.group)],
    ["topic", (g) => topicLink(g.topic)],
    ["behind", (g) => counted(unsettled(g), "event"), "n", "Events that are not settled: pending and in flight"],
    ["lag over time", (g) => spark(lag(g), `Events that ${g.group} is behind`), "", "Events that are not settled, while this page is open"],
    ["in flight", (g) => count(g.inflight), "n", "Events that were delivered and are not settled"],
    ["oldest", (g) => (g.oldestUnackedMs ? span(g.oldestUnackedMs) : none), "n", "How long ago the oldest event was stored that is not acknowledged"],
    ["redelivered", (g) => count(g.redelivered), "n", "Events in flight that were delivered more than once"],
    ["members", (g) => count(g.members), "n", "Subscriptions of the group on this hub"],
    ["settled up to", (g) => when(g.lastTs), "", "When the newest event was stored up to which everything is settled"],
    ["state", (g) => marks(g)],
  ], rows, "There are no groups yet, or the token shows none.", (g) => `${g.topic} ${g.group}`);
}

const marks = (g) => [
  g.paused ? state("paused", "bad") : null, g.stuck ? state(`stuck for ${span(Date.now() - g.stuck)}`, "bad", "Events and requests wait, and NATS delivers nothing") : null, !g.paused && !g.stuck ? state("running", "good") : null,
  g.groupTtlMs ? el("span", { class: "mark", title: "The group is removed when it has had no member for so long" }, `for ${span(g.groupTtlMs)}`) : null,
];

export const groups = {
  title: "Groups",
  load: (route, signal) => ask(["groups"], { query: { topic: route[1], limit: PAGE, next: at("groups") }, signal }),
  render(o, [, topic]) {
    const behind = o.groups.filter((g) => unsettled(g) > 0).sort((a, b) => unsettled(b) - unsettled(a)).slice(0, 5);
    const drawn = groupTable(o.groups);
    const names = behind.map((g) => [lag(g), topic ? g.group : `${g.group} on ${g.topic}`]).sort((a, b) => a[0].localeCompare(b[0]));
    const go = el("form", { class: "row", role: "search", onsubmit: (e) => {
      e.preventDefault();
      const given = new FormData(e.target);
      const [t, g] = [given.get("topic").trim(), given.get("group").trim()];
      if (g && !t) say("A group has a name on its topic: give the topic, too.", true);
      else location.hash = t ? `#/groups/${enc(t)}${g ? `/${enc(g)}` : ""}` : "#/groups";
    } }, field("Topic", el("input", { name: "topic", value: topic ?? "", autocomplete: "off" })), field("Group", el("input", { name: "group", autocomplete: "off" })), el("button", { type: "submit" }, "Show"));
    return [
      topic ? el("h1", {}, "Groups of ", topicLink(topic)) : null, go,
      names.length ? el("div", { class: "plots one" }, plotted("Events behind: the five groups of this page that are furthest", names)) : null,
      drawn, pager("groups", o.next),
    ];
  },
};

export const group = {
  title: "Group",
  load: async ([, t, g], signal) => {
    const [info, marked, members] = await Promise.all([
      ask(["groups", t, g], { signal }), ask(["groups", t, g, "bookmarks"], { signal }), maybe(["connections"], { query: { topic: t, group: g, limit: PAGE }, signal }),
    ]);
    return { info, bookmarks: marked.bookmarks, members };
  },
  render({ info: g, bookmarks, members }) {
    const name = `${g.topic} ${g.group}`;
    record(lag(g), unsettled(g));
    record(`${name} pending`, g.pending);
    record(`${name} inflight`, g.inflight);
    record(`${name} age`, g.oldestUnackedMs);
    return [
      el("h1", {}, g.group, " ", el("span", { class: "soft" }, "on "), topicLink(g.topic)),
      tiles(tile("pending", counted(g.pending, "event"), "Events that were not delivered yet"), tile("in flight", counted(g.inflight, "event"), "Events that were delivered and are not settled"),
        tile("put back", counted(g.putBack ?? 0, "event"), "How many of the pending and in-flight events a redrive has put back"),
        tile("oldest", g.oldestUnackedMs ? span(g.oldestUnackedMs) : none, "How long ago the oldest event was stored that is not acknowledged"),
        tile("redelivered", counted(g.redelivered, "event"), "Events in flight that were delivered more than once"), tile("members", count(g.members), "Subscriptions of the group on this hub"),
        tile("waiting requests", count(g.waiting), "Requests for events that wait on the server, of members on all hubs"),
        tile("settled up to", when(g.lastTs), g.lastId ? `Everything up to the event ${g.lastId} is settled` : "Nothing is settled yet"), tile("state", marks(g), "Whether the members are given events")),
      el("div", { class: "plots" }, plotted(`Lag of ${name}`, [[`${name} pending`, "pending"], [`${name} inflight`, "in flight"]]), plotted(`Age of the oldest event of ${name} that is not acknowledged`, [[`${name} age`, "age"]], span)),
      buttons(
        g.paused ? button("Resume", () => act("Resume", () => ask(["groups", g.topic, g.group, "resume"], { method: "POST" }).then(() => `Resumed ${g.group}.`)))
          : button("Pause", () => act("Pause", () => ask(["groups", g.topic, g.group, "pause"], { method: "POST" }).then(() => `Paused ${g.group}: no member gets further events.`))),
        button("Move…", () => seek(g, bookmarks)), button("Repair…", () => repair(g)), button("Add a bookmark…", () => bookmark(g)),
        el("a", { class: "button", href: `#/dead-letters/${enc(g.topic)}/${enc(g.group)}` }, "Dead letters"), button("Delete…", () => deleteGroup(g), "danger")),
      el("h2", {}, "Members on this hub"), memberTable(g, members),
      el("h2", {}, "Bookmarks"),
      table("Bookmarks", [["name", (b) => b.name], ["made", (b) => when(b.ts ?? b.at)], ["", (b) => button("Remove…", async () => {
        if (await confirmed("Remove", `Removes the bookmark ${b.name} of ${g.group}.`, "Remove")) act("Remove", () => ask(["groups", g.topic, g.group, "bookmarks", b.name], { method: "DELETE" }).then(() => `Removed the bookmark ${b.name}.`));
      }), "do"]], bookmarks, "None.", (b) => b.name),
    ];
  },
};

function memberTable(g, members) {
  if (members instanceof Refused) return note("Members with their addresses need a token that may inspect eventhub.connections.");
  const rows = members.connections.flatMap((c) => c.subscriptions.filter((s) => s.topic === g.topic && s.group === g.group).map((s) => ({ c, s })));
  const others = g.members - rows.length;
  return [
    table("Members on this hub", [
      ["principal", ({ c }) => c.principal ?? none, "", "Whose token it is"], ["kind", ({ c }) => c.kind], ["address", ({ c }) => c.remote], ["connected for", ({ c }) => span(members.now - c.since), "n"],
      ["in flight", ({ s }) => `${count(s.inFlight)} of ${count(s.maxInFlight)}`, "n", "Events that the member holds, and the most that it may hold"],
      ["queued", ({ c }) => bytes(c.queuedBytes), "n", "Bytes that wait to be sent to the member"], ["state", ({ s }) => (s.paused ? state("paused", "bad") : state("running", "good"))],
    ], rows, "No member is connected to this hub.", ({ c }) => c.id),
    others > 0 && !members.next ? note(`${counted(others, "further member")} without a connection: the hub's own.`) : null,
  ];
}

async function seek(g, bookmarks) {
  const to = el("select", { name: "to" }, options([["earliest", "the oldest event"], ["latest", "the end"], ["ts", "a time"], ["back", "a number of events back"], ["afterId", "behind an event"], ...(bookmarks.length ? [["bookmark", "a bookmark"]] : [])]));
  const parts = {
    ts: field("Time", el("input", { name: "ts", type: "datetime-local", step: "1" })), back: field("Events back", el("input", { name: "n", type: "number", min: "1" })),
    afterId: field("Event id", el("input", { name: "afterId" })), bookmark: bookmarks.length ? field("Bookmark", el("select", { name: "name" }, bookmarks.map((b) => el("option", {}, b.name)))) : null,
  };
  const fit = () => Object.entries(parts).forEach(([name, part]) => { if (part) part.hidden = name !== to.value; });
  to.addEventListener("change", fit);
  fit();
  const values = await dialog(`Move ${g.group}`, [field("To", to), ...Object.values(parts)], { yes: "Look" });
  if (!values) return;
  const body = { to: values.to };
  if (values.to === "ts") body.ts = values.ts ? new Date(values.ts).getTime() : undefined;
  if (values.to === "back") body.n = values.n ? Number(values.n) : undefined;
  if (values.to === "afterId") body.afterId = values.afterId;
  if (values.to === "bookmark") body.name = values.name;
  const path = ["groups", g.topic, g.group, "cursor"];
  const told = (d) => `${d.atMost ? "At most " : ""}${counted(d.redelivered, "event")} ${d.redelivered === 1 ? "is" : "are"} delivered again, and ${count(d.skipped)} skipped.`;
  try {
    const would = await ask(path, { method: "PUT", body: { ...body, dry_run: true } });
    if (!(await confirmed(`Move ${g.group}`, told(would), "Move"))) return;
  } catch (err) {
    say(`Move: ${err.message}`, true);
    return;
  }
  act("Move", async () => `Moved ${g.group}. ${told(await ask(path, { method: "PUT", body }))}`);
}

async function bookmark(g) {
  const values = await dialog("Bookmark", field("Name", el("input", { name: "name", required: true, autocomplete: "off" })), { yes: "Add" });
  if (values) act("Bookmark", () => ask(["groups", g.topic, g.group, "bookmarks", values.name], { method: "PUT" }).then(() => `Added the bookmark ${values.name}.`));
}

async function repair(g) {
  const path = ["groups", g.topic, g.group, "repair"];
  const told = (r) => `${r.atMost ? "At most " : ""}${counted(r.redelivered, "settled event")} ${r.redelivered === 1 ? "comes" : "come"} again.`;
  try {
    const would = await ask(path, { method: "POST", body: { dry_run: true } });
    if (!(await confirmed(`Repair ${g.group}`, `Moves the group to a new consumer, at its place. Leases end, and what is not settled comes again. ${told(would)}`, "Repair"))) return;
  } catch (err) {
    say(`Repair: ${err.message}`, true);
    return;
  }
  act("Repair", async () => `Repaired ${g.group}. ${told(await ask(path, { method: "POST", body: {} }))}`);
}

async function deleteGroup(g) {
  if (!(await confirmed(`Delete ${g.group}`, `Removes the group of ${g.topic} with its position. Its members are unsubscribed.`, "Delete", g.group))) return;
  await act("Delete", async () => {
    await ask(["groups", g.topic, g.group], { method: "DELETE" });
    location.hash = "#/groups";
    return `Deleted ${g.group}.`;
  });
}
