// The dashboard of a hub. It asks the operations port that serves it, and nothing else.
//
// All text from the hub becomes text nodes: no view builds markup from strings.

const POLL_MS = 2000; // how often the view that is shown asks again
const HISTORY = 450; // points of a plot: 15 minutes
const MAX_SERIES = 200; // groups and figures whose history is kept
const PAGE = 100; // rows of a page

// --- Elements -------------------------------------------------------------------------------

/** el makes an element. Strings among the children become text. */
function el(name, props = {}, ...children) {
  const e = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === false) continue;
    if (key.startsWith("on")) e.addEventListener(key.slice(2), value);
    else e.setAttribute(key, value === true ? "" : String(value));
  }
  e.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return e;
}

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const count = (n) => (n === undefined || n === null ? "–" : number.format(n));

function bytes(n) {
  if (n === undefined || n === null) return "–";
  if (n < 0) return "no limit";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${number.format(n)} ${units[i]}`;
}

function span(ms) {
  if (ms === undefined || ms === null) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const s = ms / 1000;
  if (s < 120) return `${number.format(s)} s`;
  if (s < 7200) return `${number.format(s / 60)} min`;
  if (s < 172800) return `${number.format(s / 3600)} h`;
  return `${number.format(s / 86400)} d`;
}

function when(ms) {
  if (!ms) return el("span", { class: "soft" }, "–");
  const at = new Date(ms);
  return el("time", { datetime: at.toISOString(), title: at.toISOString() }, at.toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" }));
}

/** table makes a table. columns are [title, cell(row), "n" for numbers]. */
function table(caption, columns, rows, empty) {
  const head = el("tr", {}, columns.map(([title, , kind]) => el("th", { scope: "col", class: kind }, title)));
  const body = rows.map((row) => el("tr", {}, columns.map(([, cell, kind]) => el("td", { class: kind }, cell(row)))));
  if (!rows.length) body.push(el("tr", {}, el("td", { class: "none", colspan: columns.length }, empty)));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption }, el("table", {}, el("thead", {}, head), el("tbody", {}, body)));
}

const tile = (name, value) => el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, value));
const tiles = (...all) => el("dl", { class: "tiles" }, all);
const button = (text, onclick, kind) => el("button", { type: "button", class: kind, onclick }, text);
const field = (name, input) => el("label", {}, name, input);

// --- The hub ------------------------------------------------------------------------------------

/** Refused is an answer of the hub that is an error. */
class Refused extends Error {
  constructor(status, body) {
    super(body.error ?? `The hub answered with ${status}.`);
    this.status = status;
    this.code = body.code;
  }
}

const token = () => sessionStorage.getItem("token") ?? "";

/** ask sends a request to the hub and returns its answer. Segments of the path are encoded. */
async function ask(path, { method = "GET", query, body, signal } = {}) {
  if (path.some((segment) => segment === "." || segment === "..")) {
    throw new Refused(400, { error: "A browser cannot ask about a name like this: use eventhub group on the command line.", code: "bad_options" });
  }
  const url = new URL(path.map(encodeURIComponent).join("/"), document.baseURI);
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  const headers = {};
  if (token()) headers.Authorization = `Bearer ${token()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(url, {
    method, headers, signal: signal ?? AbortSignal.timeout(25000), body: body === undefined ? undefined : JSON.stringify(body),
  });
  const text = await answer.text();
  let said = {};
  try {
    said = text ? JSON.parse(text) : {};
  } catch {
    said = { error: text.slice(0, 300) };
  }
  if (!answer.ok) throw new Refused(answer.status, said ?? {});
  return said;
}

function say(text, bad) {
  const p = el("p", { class: bad ? "bad" : "" }, text);
  $("said").append(p);
  if ($("said").children.length > 3) $("said").firstChild.remove();
  setTimeout(() => p.remove(), 8000);
}

// --- Dialogs ------------------------------------------------------------------------------------

/** dialog shows a form, and resolves with its values, or with null when it was cancelled. */
function dialog(title, content, { yes = "OK", danger = false } = {}) {
  const box = $("dialog");
  return new Promise((resolve) => {
    const end = (values) => {
      box.close();
      box.replaceChildren();
      resolve(values);
    };
    const form = el("form", {
      onsubmit: (e) => {
        e.preventDefault();
        end(e.submitter?.value === "no" ? null : Object.fromEntries(new FormData(form)));
      },
    }, el("h2", { id: "dialog-title" }, title), content,
    el("div", { class: "row" },
      el("button", { type: "submit", value: "yes", class: danger ? "danger" : "main" }, yes),
      el("button", { type: "submit", value: "no", formnovalidate: true }, "Cancel")));
    box.oncancel = (e) => { // the Escape key
      e.preventDefault();
      end(null);
    };
    box.replaceChildren(form);
    box.showModal();
  });
}

const confirmed = (title, text, yes) => dialog(title, el("p", {}, text), { yes, danger: true });

async function askForToken() {
  const values = await dialog("Token", [
    el("p", {}, "Figures on loopback need no token. Events and changes do: paste a token, such as the content of eventhub-data/token. It stays in this tab."),
    field("Token", el("input", { name: "token", type: "password", autocomplete: "off", value: token() })),
  ], { yes: "Use" });
  if (!values) return;
  const given = values.token.trim();
  if (given) sessionStorage.setItem("token", given);
  else sessionStorage.removeItem("token");
  show();
}

/** act carries out what an operator asked for, says what it did, and shows the view again. */
async function act(what, does) {
  try {
    const said = await does();
    say(said ?? `${what}: done.`);
  } catch (err) {
    say(`${what}: ${err.message}`, true);
  }
  show();
}

// --- History ------------------------------------------------------------------------------------

const series = new Map(); // name to [[seconds…], [values…]]

/** note adds a point to the history of a figure. */
function note(name, value) {
  let s = series.get(name);
  if (!s) {
    if (series.size >= MAX_SERIES) series.delete(series.keys().next().value);
    series.set(name, (s = [[], []]));
  }
  s[0].push(Date.now() / 1000);
  s[1].push(value);
  if (s[0].length > HISTORY) {
    s[0].shift();
    s[1].shift();
  }
}

const last = new Map(); // name to the total that was seen last, and when

/** rate turns a total into a rate by the second, and notes it. */
function rate(name, total) {
  const before = last.get(name);
  const now = performance.now();
  last.set(name, [total, now]);
  if (!before || now === before[1]) return undefined;
  const value = Math.max(0, ((total - before[0]) * 1000) / (now - before[1]));
  note(name, value);
  return value;
}

const plots = new Map(); // caption to the plot that is shown

/** plot shows the history of figures: [name, label]. */
function plot(caption, names) {
  const style = getComputedStyle(document.documentElement);
  const colors = [style.getPropertyValue("--accent"), style.getPropertyValue("--good"), style.getPropertyValue("--bad")];
  const soft = style.getPropertyValue("--soft");
  const line = style.getPropertyValue("--line");
  const figure = el("figure", {}, el("figcaption", {}, caption));
  const holder = el("div", { role: "img", "aria-label": caption });
  figure.append(holder);
  const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const data = () => uPlot.join(names.map(([name]) => series.get(name) ?? [[], []]));
  const p = new uPlot({
    width: 400, height: 180, cursor: { y: false }, scales: { y: { range: (_, __, max) => [0, Math.max(1, max * 1.1)] } },
    axes: [axis, { ...axis, size: 60, values: (_, all) => all.map((v) => count(v)) }],
    series: [{}, ...names.map(([, label], i) => ({ label, stroke: colors[i % colors.length], width: 2, spanGaps: true, points: { show: false }, value: (_, v) => count(v) }))],
  }, data(), holder);
  const fit = new ResizeObserver(() => p.setSize({ width: Math.max(200, holder.clientWidth), height: 180 }));
  fit.observe(holder);
  plots.set(caption, { figure, renew: () => p.setData(data()), end: () => { fit.disconnect(); p.destroy(); } });
  return figure;
}

/** plotted returns a plot that the view has already, or makes it. */
function plotted(caption, names) {
  const have = plots.get(caption);
  if (!have) return plot(caption, names);
  have.renew();
  return have.figure;
}

function endPlots() {
  for (const p of plots.values()) p.end();
  plots.clear();
}

// --- Views --------------------------------------------------------------------------------------
//
// A view is { title, load(route, signal), render(data, route) }. load asks the hub, and render
// returns nodes. A view with once is not asked again by itself, since it holds what somebody types.

const enc = encodeURIComponent;
const topicLink = (t) => el("a", { href: `#/topics/${enc(t)}` }, t);
const groupLink = (t, g) => el("a", { href: `#/groups/${enc(t)}/${enc(g)}` }, g);

const overview = {
  title: "Overview",
  load: () => ask(["overview"]),
  render(o) {
    const t = o.totals;
    const published = rate("published", t.events_published_total ?? 0);
    const delivered = rate("delivered", t.events_delivered_total ?? 0);
    const acked = rate("acked", t.events_acked_total ?? 0);
    const inFlight = t.events_inflight ?? 0;
    note("inflight", inFlight);
    note("connections", t.eventhub_connections ?? 0);
    const checks = Object.entries(o.checks).map(([name, state]) => tile(name, el("span", { class: state === "ok" ? "good" : "bad" }, state)));
    const n = o.nats;
    const parts = [
      tiles(checks, tile("up since", when(o.started)), tile("version", o.version ?? "–")),
      el("h2", {}, "Events"),
      tiles(tile("published a second", count(published)), tile("delivered a second", count(delivered)), tile("acknowledged a second", count(acked)),
        tile("in flight", count(inFlight)), tile("connections", count(t.eventhub_connections)), tile("subscriptions", count(t.eventhub_subscriptions)),
        tile("dead letters made", count(t.events_dead_lettered_total ?? 0)), tile("errors sent", count(t.eventhub_errors_total ?? 0))),
      el("div", { class: "plots" },
        plotted("Events a second", [["published", "published"], ["delivered", "delivered"], ["acked", "acknowledged"]]),
        plotted("In flight", [["inflight", "in flight"]])),
      el("h2", {}, "NATS"),
      n ? tiles(tile("server", n.server || "–"), tile("version", n.version), tile("cluster", n.cluster || "none"), tile("connections up", `${n.connected} of ${n.connections}`),
        tile("round trip", span(n.roundTripMs)), tile("streams", count(n.streams)), tile("consumers", count(n.consumers)),
        tile("on disk", bytes(n.fileBytes)), tile("disk limit", bytes(n.fileLimit)), tile("in memory", bytes(n.memoryBytes)), tile("failed requests", count(n.errors)))
        : el("p", { class: "bad" }, "NATS does not answer."),
      el("h2", {}, "Outbox and projections"),
      tiles(tile("outbox: waiting", count(t.eventhub_outbox_pending ?? 0)), tile("outbox: parked", count(t.eventhub_outbox_parked ?? 0)),
        tile("outbox: oldest", span(1000 * (t.eventhub_outbox_oldest_age_seconds ?? 0))), tile("outbox: published", count(t.eventhub_outbox_published_total ?? 0)),
        tile("projected", count(t.eventhub_projected_total ?? 0)), tile("projections stalled for", span(1000 * (t.eventhub_projection_stalled_seconds ?? 0)))),
    ];
    if (!t.events_published_total && !t.events_delivered_total) parts.unshift(firstSteps());
    return parts;
  },
};

/** firstSteps shows a first visitor what to do. */
function firstSteps() {
  const host = `${location.protocol}//${location.hostname}:8081`;
  const commands = [
    ["Listen to a topic:", "eventhub sub hello --group=me"],
    ["Publish an event from another terminal:", `eventhub pub hello '{"n":1}'`],
    ["The same over HTTP:", `curl -H "Authorization: Bearer $(cat eventhub-data/token)" -d '{"n":1}' ${host}/publish/hello`],
  ];
  return el("section", { "aria-label": "First steps" }, el("h2", {}, "Nothing has been published through this hub yet"),
    commands.map(([what, command]) => el("div", {}, el("p", {}, what), el("div", { class: "row" }, el("pre", {}, command),
      button("Copy", () => navigator.clipboard.writeText(command).then(() => say("Copied."), () => say("The browser does not allow copying.", true)))))));
}

const topics = {
  title: "Topics",
  load: () => ask(["topics"]),
  render: (o) => table("Topics", [
    ["topic", (t) => (t.topic ? topicLink(t.topic) : el("span", { class: "soft" }, t.stream))],
    ["events", (t) => count(t.events), "n"],
    ["bytes", (t) => bytes(t.bytes), "n"],
    ["oldest", (t) => when(t.firstTs)],
    ["newest", (t) => when(t.lastTs)],
    ["keeps", (t) => keeps(t.retention)],
    ["when full", (t) => t.onFull],
    ["compacted", (t) => (t.compacted ? "yes" : "")],
  ], o.topics, "There are no topics yet, or the token shows none."),
};

function keeps(r) {
  const parts = [];
  if (r?.ageMs) parts.push(span(r.ageMs));
  if (r?.bytes > 0) parts.push(bytes(r.bytes));
  if (r?.messages > 0) parts.push(`${count(r.messages)} events`);
  return parts.join(", ") || "everything";
}

const topic = {
  title: "Topic",
  parent: "topics",
  load: async (route, signal) => {
    const [t, groups] = await Promise.all([ask(["topics", route[1]], { signal }), ask(["groups"], { query: { topic: route[1], limit: PAGE }, signal })]);
    return { t, groups };
  },
  render({ t, groups }) {
    const name = t.topic;
    return [
      el("h1", {}, name),
      tiles(tile("events", count(t.events)), tile("bytes", bytes(t.bytes)), tile("oldest", when(t.first?.ts)), tile("newest", when(t.last?.ts)),
        tile("keeps", keeps(t.retention)), tile("when full", t.onFull), tile("groups", count(t.groups)), tile("replicas", count(t.replicas)),
        tile("compacted", t.compacted ? "yes" : "no")),
      t.needed ? el("p", { class: "soft" }, `The hub itself needs this topic: ${t.needed}.`) : null,
      el("div", { class: "row" },
        el("a", { href: `#/events/${enc(name)}` }, "Events"),
        t.compacted ? el("a", { href: `#/state/${enc(name)}` }, "Latest by key") : null,
        el("a", { href: `#/dead-letters/${enc(name)}` }, "Dead letters"),
        button("Purge…", () => purge(name), "danger"), button("Delete…", () => deleteTopic(name), "danger")),
      el("h2", {}, "Groups"), groupTable(groups.groups),
      (t.lost ?? []).length ? [el("h2", {}, "Lost to retention"), table("Lost events", [["group", (l) => groupLink(name, l.group)], ["events", (l) => count(l.events), "n"], ["found", (l) => when(l.ts)]], t.lost, "")] : null,
    ];
  },
};

async function purge(name) {
  const values = await dialog(`Purge ${name}`, [
    el("p", {}, "Removes stored events for good. Groups that have not got them lose them."),
    field("Older than (leave empty for all events)", el("input", { name: "before", type: "datetime-local", step: "1" })),
  ], { yes: "Look" });
  if (!values) return;
  const body = values.before ? { before_ts: new Date(values.before).getTime() } : { all: true };
  try {
    const would = await ask(["topics", name, "purge"], { method: "POST", body: { ...body, dry_run: true } });
    if (!(await confirmed(`Purge ${name}`, `Remove ${count(would.removed)} events; ${count(would.left)} stay.`, "Purge"))) return;
  } catch (err) {
    say(`Purge: ${err.message}`, true);
    return;
  }
  act("Purge", async () => {
    const did = await ask(["topics", name, "purge"], { method: "POST", body });
    return `Removed ${count(did.removed)} events of ${name}; ${count(did.left)} are left.`;
  });
}

async function deleteTopic(name) {
  if (!(await confirmed(`Delete ${name}`, "Removes the topic with all its events and groups.", "Delete"))) return;
  await act("Delete", async () => {
    await ask(["topics", name], { method: "DELETE" });
    location.hash = "#/topics";
    return `Deleted ${name}.`;
  });
}

function groupTable(rows) {
  return table("Groups", [
    ["topic", (g) => topicLink(g.topic)],
    ["group", (g) => groupLink(g.topic, g.group)],
    ["pending", (g) => count(g.pending), "n"],
    ["in flight", (g) => count(g.inflight), "n"],
    ["oldest not acknowledged", (g) => (g.oldestUnackedMs ? span(g.oldestUnackedMs) : "–"), "n"],
    ["redelivered", (g) => count(g.redelivered), "n"],
    ["members here", (g) => count(g.members), "n"],
    ["state", (g) => [g.paused ? el("span", { class: "bad" }, "paused ") : null, g.stuck ? el("span", { class: "bad" }, "stuck ") : null, g.groupTtlMs ? el("span", { class: "soft" }, `for ${span(g.groupTtlMs)}`) : null]],
  ], rows, "There are no groups yet, or the token shows none.");
}

const groups = {
  title: "Groups",
  load: (route, signal) => ask(["groups"], { query: { topic: route[1], limit: PAGE, next: pages.get("groups") }, signal }),
  render: (o) => [groupTable(o.groups), pager("groups", o.next)],
};

const pages = new Map(); // view to where its page begins

/** pager has the buttons of a list with pages. */
function pager(name, next) {
  return el("div", { class: "row" },
    pages.get(name) ? button("First page", () => { pages.delete(name); show(); }) : null,
    next ? button("Next page", () => { pages.set(name, next); show(); }) : null);
}

const group = {
  title: "Group",
  parent: "groups",
  load: async ([, t, g], signal) => {
    const [info, marks] = await Promise.all([ask(["groups", t, g], { signal }), ask(["groups", t, g, "bookmarks"], { signal })]);
    return { info, marks: marks.bookmarks };
  },
  render({ info: g, marks }) {
    const at = `${g.topic} ${g.group}`;
    note(`${at} pending`, g.pending);
    note(`${at} inflight`, g.inflight);
    note(`${at} age`, g.oldestUnackedMs / 1000);
    return [
      el("h1", {}, g.group, " ", el("span", { class: "soft" }, "on "), topicLink(g.topic)),
      tiles(tile("pending", count(g.pending)), tile("in flight", count(g.inflight)), tile("oldest not acknowledged", g.oldestUnackedMs ? span(g.oldestUnackedMs) : "–"),
        tile("redelivered", count(g.redelivered)), tile("members on this hub", count(g.members)), tile("requests that wait", count(g.waiting)),
        tile("settled up to", when(g.lastTs)), tile("state", g.paused ? el("span", { class: "bad" }, "paused") : "running")),
      el("div", { class: "plots" }, plotted(`Events of ${at}`, [[`${at} pending`, "pending"], [`${at} inflight`, "in flight"]]), plotted(`Oldest not acknowledged of ${at}, seconds`, [[`${at} age`, "seconds"]])),
      el("div", { class: "row" },
        g.paused ? button("Resume", () => act("Resume", () => ask(["groups", g.topic, g.group, "resume"], { method: "POST" }).then(() => `Resumed ${g.group}.`)))
          : button("Pause", () => act("Pause", () => ask(["groups", g.topic, g.group, "pause"], { method: "POST" }).then(() => `Paused ${g.group}: no member gets further events.`))),
        button("Move…", () => seek(g, marks)), button("Add a bookmark…", () => bookmark(g)),
        button("Delete…", () => deleteGroup(g), "danger"), el("a", { href: `#/dead-letters/${enc(g.topic)}/${enc(g.group)}` }, "Dead letters")),
      el("h2", {}, "Bookmarks"),
      table("Bookmarks", [["name", (b) => b.name], ["made", (b) => when(b.ts ?? b.at)], ["", (b) => button("Remove", () => act("Remove", () => ask(["groups", g.topic, g.group, "bookmarks", b.name], { method: "DELETE" }).then(() => `Removed the bookmark ${b.name}.`)))]], marks, "None."),
    ];
  },
};

async function seek(g, marks) {
  const to = el("select", { name: "to" }, [["earliest", "the oldest event"], ["latest", "the end"], ["ts", "a time"], ["back", "a number of events back"], ["afterId", "behind an event"], ...(marks.length ? [["bookmark", "a bookmark"]] : [])].map(([v, text]) => el("option", { value: v }, text)));
  const values = await dialog(`Move ${g.group}`, [
    field("To", to),
    field("Time", el("input", { name: "ts", type: "datetime-local", step: "1" })),
    field("Events back", el("input", { name: "n", type: "number", min: "1" })),
    field("Event id", el("input", { name: "afterId" })),
    marks.length ? field("Bookmark", el("select", { name: "name" }, marks.map((b) => el("option", {}, b.name)))) : null,
  ], { yes: "Look" });
  if (!values) return;
  const body = { to: values.to };
  if (values.to === "ts") body.ts = values.ts ? new Date(values.ts).getTime() : undefined;
  if (values.to === "back") body.n = values.n ? Number(values.n) : undefined;
  if (values.to === "afterId") body.afterId = values.afterId;
  if (values.to === "bookmark") body.name = values.name;
  const path = ["groups", g.topic, g.group, "cursor"];
  const told = (d) => `${d.atMost ? "At most " : ""}${count(d.redelivered)} events ${d.redelivered === 1 ? "is" : "are"} delivered again, and ${count(d.skipped)} skipped.`;
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
  const values = await dialog("Bookmark", field("Name", el("input", { name: "name", required: true })), { yes: "Add" });
  if (values) act("Bookmark", () => ask(["groups", g.topic, g.group, "bookmarks", values.name], { method: "PUT" }).then(() => `Added the bookmark ${values.name}.`));
}

async function deleteGroup(g) {
  if (!(await confirmed(`Delete ${g.group}`, `Removes the group of ${g.topic} with its position. Its members are unsubscribed.`, "Delete"))) return;
  await act("Delete", async () => {
    await ask(["groups", g.topic, g.group], { method: "DELETE" });
    location.hash = "#/groups";
    return `Deleted ${g.group}.`;
  });
}

const letters = {
  title: "Dead letters",
  load: async ([, t, g], signal) => {
    const query = { topic: t, group: g };
    const [counts, list] = await Promise.all([ask(["dlq", "counts"], { query, signal }), ask(["dlq"], { query: { ...query, limit: PAGE, next: pages.get("letters") }, signal })]);
    return { counts, list };
  },
  render({ counts, list }, [, t, g]) {
    const where = (c) => ({ topic: c.topic, group: c.group });
    return [
      t ? el("h1", {}, "Dead letters of ", topicLink(t), g ? [" for ", groupLink(t, g)] : null) : null,
      el("p", {}, `${count(counts.total)} in all.`),
      table("By group", [
        ["topic", (c) => topicLink(c.topic)], ["group", (c) => (c.group ? groupLink(c.topic, c.group) : "–")], ["dead letters", (c) => count(c.count), "n"],
        ["first", (c) => when(c.firstTs)], ["last", (c) => when(c.lastTs)],
        ["", (c) => c.group && [button("Redrive all…", () => redrive(where(c), `all ${count(c.count)} dead letters of ${c.group} on ${c.topic}`)), " ", button("Discard all…", () => discard(where(c), `all ${count(c.count)} dead letters of ${c.group} on ${c.topic}`), "danger")]],
      ], counts.groups, "There are none."),
      el("h2", {}, "Letters, oldest first"),
      table("Dead letters", [
        ["failed", (l) => when(l.ts)], ["topic", (l) => l.topic], ["group", (l) => l.group ?? "–"], ["attempts", (l) => count(l.attempts), "n"],
        ["reason", (l) => l.fault ?? l.err ?? "", "text"], ["event", (l) => el("code", {}, l.original?.id ?? "")],
        ["", (l) => [button("Show", () => showLetter(l)), " ", button("Redrive…", () => redrive({ topic: l.topic, id: l.id }, `the event ${l.original?.id ?? l.id}`)), " ", button("Discard…", () => discard({ topic: l.topic, id: l.id }, `the dead letter of ${l.original?.id ?? l.id}`), "danger")]],
      ], list.letters, "There are none."),
      pager("letters", list.next),
    ];
  },
};

const pretty = (value) => el("pre", { tabindex: "0" }, JSON.stringify(value, null, 2));
const showLetter = (l) => dialog("Dead letter", pretty(l), { yes: "Close" });

async function redrive(query, what) {
  const to = el("select", { name: "to" }, el("option", { value: "group" }, "to the group that failed"), el("option", { value: "topic" }, "to the topic, for all groups"));
  const values = await dialog("Redrive", [el("p", {}, `Delivers ${what} again.`), field("Where", to)], { yes: "Redrive" });
  if (values) act("Redrive", () => change("redrive", { ...query, to: values.to }, "Put back"));
}

async function discard(query, what) {
  if (await confirmed("Discard", `Removes ${what} for good.`, "Discard")) act("Discard", () => change("discard", query, "Removed"));
}

async function change(how, query, did) {
  const done = await ask(["dlq", how], { method: "POST", query, signal: AbortSignal.timeout(600000) });
  return `${did} ${count(done.done)} of ${count(done.matched)}${done.skipped ? `; ${count(done.skipped)} skipped` : ""}.`;
}

const events = {
  title: "Events",
  once: true,
  load: async ([, t], signal) => ({ topics: await ask(["topics"], { signal }).catch(() => ({ topics: [] })), page: t ? await ask(["events"], { query: { topic: t, ...asked }, signal }) : null }),
  render({ topics: list, page }, [, t]) {
    const names = el("datalist", { id: "names" }, list.topics.filter((x) => x.topic).map((x) => el("option", { value: x.topic })));
    const option = (v, text) => el("option", { value: v, selected: (asked.from ?? "latest") === v }, text);
    const form = el("form", { class: "row", onsubmit: (e) => { e.preventDefault(); find(new FormData(form)); } }, names,
      field("Topic", el("input", { name: "topic", list: "names", value: t ?? "", required: true })),
      field("From", el("select", { name: "from" }, option("latest", "the newest"), option("earliest", "the oldest"), option("ts", "a time"), option("afterId", "behind an event"))),
      field("Time", el("input", { name: "ts", type: "datetime-local", step: "1" })),
      field("Event id", el("input", { name: "afterId", value: asked.afterId ?? "" })),
      field("Key", el("input", { name: "key", value: asked.key ?? "" })),
      el("button", { type: "submit", class: "main" }, "Show"));
    return [form, page ? shownEvents(page) : el("p", { class: "soft" }, "Choose a topic."), publishBox(t)];
  },
};

let asked = {};

function find(values) {
  const from = values.get("from");
  asked = { from, key: values.get("key") || undefined };
  if (from === "ts") asked.ts = String(new Date(values.get("ts") || 0).getTime());
  if (from === "afterId") asked.afterId = values.get("afterId");
  if (asked.key && from === "latest") asked.from = "earliest";
  const hash = `#/events/${enc(values.get("topic"))}`;
  if (location.hash === hash) show();
  else location.hash = hash;
}

function shownEvents(page) {
  const newest = page.events.at(-1);
  return [
    page.truncated ? el("p", { class: "bad" }, "Retention has removed events from the beginning.") : null,
    table("Events", [
      ["stored or given time", (e) => when(e.ts)], ["id", (e) => el("code", {}, e.id)], ["topic", (e) => e.topic], ["key", (e) => e.key ?? ""],
      ["payload", (e) => el("code", {}, short(e.payload)), "text"], ["", (e) => button("Show", () => dialog("Event", pretty(e), { yes: "Close" }))],
    ], page.events, "There are no events there."),
    page.more ? button("Next page", () => { asked = { ...asked, from: "afterId", afterId: newest.id, ts: undefined }; show(); }) : null,
  ];
}

function short(payload) {
  const text = JSON.stringify(payload) ?? "";
  return text.length > 160 ? `${text.slice(0, 160)}…` : text;
}

function publishBox(t) {
  const form = el("form", { onsubmit: (e) => { e.preventDefault(); publish(new FormData(form)); } },
    el("h2", {}, "Publish"),
    el("div", { class: "row" }, field("Topic", el("input", { name: "topic", value: t ?? "", required: true })), field("Key (optional)", el("input", { name: "key" }))),
    field("Payload, JSON", el("textarea", { name: "payload", required: true, spellcheck: "false" }, '{"hello":"world"}')),
    el("div", { class: "row" }, el("button", { type: "submit", class: "main" }, "Publish")));
  return form;
}

async function publish(values) {
  let payload;
  try {
    payload = JSON.parse(values.get("payload"));
  } catch (err) {
    say(`The payload is not JSON: ${err.message}`, true);
    return;
  }
  try {
    const did = await ask(["publish", values.get("topic")], { method: "POST", body: { payload, key: values.get("key") || undefined } });
    say(did.duplicate ? `An event with the id ${did.id} was stored before.` : `Published ${did.id}.`);
  } catch (err) {
    say(`Publish: ${err.message}`, true);
  }
}

const state = {
  title: "State",
  load: ([, t], signal) => ask(["keys"], { query: { topic: t ?? "process.state", limit: PAGE, offset: pages.get("state") }, signal }),
  render: (o, [, t]) => [
    el("h1", {}, "Latest by key of ", topicLink(t ?? "process.state")),
    table("Latest by key", [
      ["key", (e) => e.key], ["time", (e) => when(e.ts)], ["status", (e) => statusOf(e.payload)], ["payload", (e) => el("code", {}, short(e.payload)), "text"],
      ["", (e) => button("Show", () => dialog(e.key, pretty(e), { yes: "Close" }))],
    ], o.items, "There are no keys."),
    pager("state", o.more ? String(o.offset + o.count) : undefined),
  ],
};

function statusOf(payload) {
  const status = payload?.status ?? payload?.state ?? "";
  if (typeof status !== "string") return "";
  return el("span", { class: /alive|live|up|ok/.test(status) ? "good" : /stale|dead|down/.test(status) ? "bad" : "" }, status);
}

const connections = {
  title: "Connections",
  load: (_, signal) => ask(["connections"], { query: { limit: PAGE, next: pages.get("connections") }, signal }),
  render: (o) => [
    el("p", { class: "soft" }, "Of this hub."),
    table("Connections", [
      ["principal", (c) => c.principal ?? el("span", { class: "soft" }, "none yet")], ["address", (c) => c.remote], ["age", (c) => span(o.now - c.since), "n"],
      ["queued", (c) => bytes(c.queuedBytes), "n"],
      ["subscriptions", (c) => c.subscriptions.map((s) => el("div", {}, topicLink(s.topic), " ", groupLink(s.topic, s.group), ` ${s.inFlight} of ${s.maxInFlight} in flight${s.paused ? ", paused" : ""}`))],
      ["", (c) => button("Close…", async () => {
        if (await confirmed("Close", `Closes the connection of ${c.principal ?? c.remote}. Its client may connect again.`, "Close the connection")) act("Close", () => ask(["connections", c.id], { method: "DELETE" }).then(() => `Closed the connection of ${c.principal ?? c.remote}.`));
      }, "danger")],
    ], o.connections, "Nobody is connected."),
    pager("connections", o.next),
  ],
};

const views = { "": overview, topics, groups, "dead-letters": letters, events, state, connections };
const details = { topics: topic, groups: group };

// --- Showing ------------------------------------------------------------------------------------

function parse() {
  const [name = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  return [views[name] ? name : "", ...rest];
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
  const view = route[0] === "topics" && route[1] ? details.topics : route[0] === "groups" && route[2] ? details.groups : views[route[0]];
  const fresh = shownHash !== location.hash;
  if (fresh) {
    endPlots();
    if (shownHash !== undefined && shownHash.split("/")[1] !== location.hash.split("/")[1]) pages.clear();
    renderNav(route[0]);
    document.title = `${view.title} – eventhub`;
  }
  try {
    const data = await view.load(route, AbortSignal.any([mine.signal, AbortSignal.timeout(20000)]));
    if (loading !== mine) return;
    draw(view, view.render(data, route), fresh);
    reachable(true);
  } catch (err) {
    if (loading !== mine) return;
    if (err instanceof Refused) {
      reachable(true);
      draw(view, refusal(err), fresh);
    } else {
      reachable(false);
    }
  }
  shownHash = location.hash;
  if (!(view.once && $("gone").hidden)) timer = setTimeout(() => (document.hidden ? wait() : show()), POLL_MS);
}

/** wait asks again when the page is visible again. */
function wait() {
  document.addEventListener("visibilitychange", () => show(), { once: true });
}

/** draw replaces the content, and keeps the focus and the scrolling where they were. */
function draw(view, nodes, fresh) {
  const main = $("main");
  const all = [nodes].flat(Infinity).filter((n) => n !== null && n !== undefined && n !== false);
  if (!all.some((n) => n.tagName === "H1")) all.unshift(el("h1", {}, view.title));
  if (!fresh && $("dialog").open) return; // somebody decides on what is shown
  const focus = fresh ? -1 : focusable(main).indexOf(document.activeElement);
  const scrolled = [...main.querySelectorAll(".wide")].map((w) => w.scrollLeft);
  main.replaceChildren(...all);
  if (!fresh) main.querySelectorAll(".wide").forEach((w, i) => { w.scrollLeft = scrolled[i] ?? 0; });
  if (focus >= 0) focusable(main)[focus]?.focus({ preventScroll: true });
  else if (fresh && shownHash !== undefined) main.focus({ preventScroll: true });
  if (fresh) scrollTo(0, 0);
}

const focusable = (root) => [...root.querySelectorAll("a, button, input, select, textarea, [tabindex]")];

function refusal(err) {
  if (err.status === 401 || err.status === 403) {
    return [el("p", {}, err.status === 401 ? "This view needs a token." : "The token does not allow this view."), el("p", { class: "soft" }, err.message), button("Set the token", askForToken, "main")];
  }
  return el("p", { class: "bad" }, err.message);
}

/** reachable says whether the hub answers. */
function reachable(does) {
  const gone = $("gone");
  if (does && !gone.hidden) {
    last.clear(); // the totals of a hub that was started again begin at 0
    say("The hub answers again.");
  }
  gone.hidden = does;
  gone.textContent = does ? "" : "The hub does not answer. This page tries again every 2 seconds; what it shows is old.";
}

function renderNav(current) {
  $("nav").replaceChildren(...Object.entries(views).map(([name, view]) => el("a", { href: `#/${name}`, "aria-current": name === current ? "page" : undefined }, view.title)));
}

$("token").addEventListener("click", askForToken);
addEventListener("hashchange", () => show());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { endPlots(); show(); });
show();
