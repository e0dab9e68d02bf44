// Events, publishing, and the newest event of each key.

import { $, button, buttons, bytes, count, el, enc, field, none, note, options, say, short, shown, span, state as mark, table, topicLink, updateChildren, when } from "./dom.js";
import { ask, follow, maybe, refusal } from "./hub.js";
import { PAGE, at, pager } from "./pages.js";

let asked = {}; // what the form asks for
let shownOf; // the topic that asked is about
let live; // the topic that is followed: its newest events, and how to stop

const LIVE_ROWS = 100; // how many events are shown of a topic that is followed

export const events = {
  title: "Events",
  once: true,
  load: async ([, t], signal) => {
    if (t !== shownOf) [asked, shownOf] = [asked.of === t ? asked : {}, t];
    const { of, next, ...query } = asked;
    if (t && asked.from === "live") {
      const list = await maybe(["topics"], { signal });
      if (live?.of !== t) followTopic(t);
      return { topics: list.topics ?? [] };
    }
    live?.stop();
    if (next) [query.from, query.afterId, query.ts] = ["afterId", next, undefined];
    const [list, page] = await Promise.all([maybe(["topics"], { signal }), t ? ask(["events"], { query: { topic: t, ...query }, signal }).catch((err) => (err.status === 404 ? { events: [] } : Promise.reject(err))) : null]);
    return { topics: list.topics ?? [], page };
  },
  render({ topics: list, page }, [, t]) {
    const names = el("datalist", { id: "names" }, list.filter((x) => x.topic).map((x) => el("option", { value: x.topic })));
    const from = el("select", { name: "from" }, options([["latest", "the newest"], ["live", "the newest, and then each as it comes"], ["earliest", "the oldest, onwards"], ["ts", "a time, onwards"], ["afterId", "behind an event"], ["id", "one event by its id"]], asked.id ? "id" : asked.from ?? "latest"));
    const time = field("Time", el("input", { name: "ts", type: "datetime-local", step: "1", value: asked.local }));
    const id = field("Event id", el("input", { name: "id", value: asked.id ?? asked.afterId ?? "", autocomplete: "off", spellcheck: "false" }));
    const key = field("Key (optional)", el("input", { name: "key", value: asked.key ?? "", autocomplete: "off" }));
    const fit = () => {
      time.hidden = from.value !== "ts";
      id.hidden = from.value !== "afterId" && from.value !== "id";
      key.hidden = from.value === "latest" || from.value === "live" || from.value === "id";
    };
    from.addEventListener("change", fit);
    fit();
    const form = el("form", { class: "row", role: "search", key: `events of ${t}`, onsubmit: (e) => { e.preventDefault(); find(new FormData(e.target)); } }, names,
      field("Topic", el("input", { name: "topic", list: "names", value: t ?? "", required: true, autocomplete: "off" })), field("From", from), time, id, key,
      el("button", { type: "submit", class: "main" }, "Show"));
    let below = note("Choose a topic.");
    if (live) below = el("section", { id: "live", key: `live events of ${t}` }, liveEvents());
    else if (page) below = shownEvents(page);
    return [form, below, publishBox(t)];
  },
};

function find(values) {
  const from = values.get("from");
  asked = { of: values.get("topic").trim() };
  if (from === "id") asked.id = values.get("id").trim();
  else asked.from = from;
  if (from !== "latest" && from !== "live" && from !== "id") asked.key = values.get("key") || undefined;
  if (from === "ts") asked.ts = String(new Date(values.get("ts") || 0).getTime());
  if (from === "afterId") asked.afterId = values.get("id").trim();
  shownOf = asked.of;
  const hash = `#/events/${enc(asked.of)}`;
  if (location.hash === hash) dispatchEvent(new HashChangeEvent("hashchange"));
  else location.hash = hash;
}

/** followTopic begins to show the events of a topic as they come, until another view is shown. */
function followTopic(t) {
  live?.stop();
  const ending = new AbortController();
  const mine = { of: t, events: [], missed: 0, away: false, stop: () => { ending.abort(); live = undefined; } };
  live = mine;
  let due;
  const changed = () => {
    due ??= requestAnimationFrame(() => {
      due = undefined;
      const box = $("live");
      if (live === mine && box) updateChildren(box, liveEvents());
    });
  };
  follow(t, LIVE_ROWS, (name, data) => {
    mine.away = name === "away";
    if (name === "event") {
      Object.defineProperty(data.event, "pos", { value: data.ctx.pos }); // it is not shown
      mine.events = [data.event, ...mine.events.slice(0, LIVE_ROWS - 1)];
    }
    if (name === "gap") mine.missed += data.missed;
    changed();
  }, ending.signal).catch((err) => {
    mine.refused = err;
    changed();
  });
}

addEventListener("hashchange", () => {
  if (live && location.hash !== `#/events/${enc(live.of)}`) live.stop();
});

function liveEvents() {
  if (live.refused) return [refusal(live.refused)].flat();
  return [
    live.away ? el("p", { class: "bad" }, "The hub does not send events. This page tries again every 2 seconds.") : el("p", { class: "soft", role: "status" }, "Events appear as they come."),
    live.missed > 0 ? el("p", { class: "bad" }, `${count(live.missed)} events are not shown, because they came faster than this page took them.`) : null,
    eventTable(live.events, "There are no events yet.", (e) => e.pos),
  ].filter((n) => n !== null);
}

function eventTable(list, nothing, keyOf) {
  return table("Events", [
    ["time", (e) => when(e.ts), "", "The event's own time, or when it was stored"], ["key", (e) => e.key ?? none], ["payload", (e) => el("code", {}, short(e.payload)), "text"],
    ["id", (e) => el("code", {}, e.id), "id"], ["", (e) => button("Show", () => shown("Event", e)), "do"],
  ], list, nothing, keyOf);
}

function shownEvents(page) {
  const last = page.events.at(-1);
  return [
    page.truncated ? el("p", { class: "bad" }, "Retention has removed events from the beginning.") : null,
    eventTable(page.events, "There are no such events.", (e) => e.id),
    page.more ? buttons(button("Next page", () => { asked = { ...asked, next: last.id }; dispatchEvent(new HashChangeEvent("hashchange")); })) : null,
  ];
}

function publishBox(t) {
  return el("form", { class: "box", key: `publish to ${t}`, onsubmit: (e) => { e.preventDefault(); publish(new FormData(e.target)); } },
    el("h2", {}, "Publish"),
    el("div", { class: "row" }, field("Topic", el("input", { name: "topic", value: t ?? "", required: true, autocomplete: "off" })), field("Key (optional)", el("input", { name: "key", autocomplete: "off" }))),
    field("Payload, JSON", el("textarea", { name: "payload", required: true, spellcheck: "false" }, '{"hello":"world"}')),
    el("div", { class: "row" }, el("button", { type: "submit", class: "main" }, "Publish")));
}

async function publish(values) {
  let payload;
  try {
    payload = JSON.parse(values.get("payload"));
  } catch (err) {
    say(`The payload is not JSON: ${err.message}`, true);
    return;
  }
  const topic = values.get("topic").trim();
  try {
    const did = await ask(["publish", topic], { method: "POST", body: { payload, key: values.get("key") || undefined } });
    say(did.duplicate ? `An event with the id ${did.id} was stored before.` : `Published ${did.id} to ${topic}.`);
    if (topic === shownOf) dispatchEvent(new HashChangeEvent("hashchange"));
  } catch (err) {
    say(`Publish: ${err.message}`, true);
  }
}

const PROCESSES = "process.state"; // the topic of the hub's own projector

export const state = {
  title: "State",
  load: ([, t], signal) => ask(["keys"], { query: { topic: t ?? PROCESSES, limit: PAGE, offset: at("state") }, signal }),
  render: (o, [, t]) => {
    const topic = t ?? PROCESSES;
    const last = ["", (e) => button("Show", () => shown(e.key, e)), "do"];
    const columns = topic === PROCESSES ? [
      ["process", (e) => e.payload?.name ?? e.key], ["status", (e) => statusOf(e.payload)], ["host", (e) => e.payload?.host ?? none], ["process id", (e) => String(e.payload?.pid ?? none), "n"],
      ["CPU", (e) => (e.payload?.cpu_pct === undefined ? none : `${count(e.payload.cpu_pct)} %`), "n", "Of one core"], ["memory", (e) => (e.payload?.mem_mb === undefined ? none : bytes(e.payload.mem_mb * 1048576)), "n"],
      ["last heartbeat", (e) => when(e.payload?.last_seen_ts)], ["age", (e) => (e.payload?.last_seen_ts ? span(Math.max(0, Date.now() - e.payload.last_seen_ts)) : none), "n", "By the clock of this browser"], last,
    ] : [["key", (e) => e.key], ["time", (e) => when(e.ts)], ["status", (e) => statusOf(e.payload)], ["payload", (e) => el("code", {}, short(e.payload)), "text"], last];
    return [
      el("h1", {}, "Latest by key of ", topicLink(topic)),
      table(`The newest event of each key of ${topic}`, columns, o.items, topic === PROCESSES ? "There are none. The hub projects heartbeats with eventhub serve --projector or --demo." : "There are no keys.", (e) => e.key),
      pager("state", o.more ? String(o.offset + o.count) : undefined),
    ];
  },
};

function statusOf(payload) {
  const status = payload?.status ?? payload?.state ?? "";
  if (typeof status !== "string" || !status) return none;
  return mark(status, /^(alive|live|up|ok)$/.test(status) ? "good" : /^(stale|dead|down)$/.test(status) ? "bad" : "");
}
