// Dead letters.

import { button, confirmed, count, counted, dialog, el, field, groupLink, none, options, say, shown, state, table, topicLink, when } from "./dom.js";
import { act, ask } from "./hub.js";
import { PAGE, at, pager } from "./pages.js";

export const letters = {
  title: "Dead letters",
  load: async ([, t, g], signal) => {
    const query = { topic: t, group: g };
    const [counts, list] = await Promise.all([ask(["dlq", "counts"], { query, signal }), ask(["dlq"], { query: { ...query, limit: PAGE, next: at("letters") }, signal })]);
    return { counts, list };
  },
  render({ counts, list }, [, t, g]) {
    const where = (c) => ({ topic: c.topic, group: c.group });
    const all = (c) => (n) => `all ${counted(n, "dead letter")} of ${c.group} on ${c.topic}`;
    return [
      t ? el("h1", {}, "Dead letters of ", topicLink(t), g ? [" for ", groupLink(t, g)] : null) : null,
      el("p", {}, `${counted(counts.total, "dead letter")} in all: events that failed too often for a group.`),
      table("Dead letters by group", [
        ["group", (c) => (c.group ? groupLink(c.topic, c.group) : none)], ["topic", (c) => topicLink(c.topic)], ["dead letters", (c) => count(c.count), "n"],
        ["first", (c) => when(c.firstTs), "", "When the oldest dead letter was made"], ["last", (c) => when(c.lastTs), "", "When the newest dead letter was made"],
        ["", (c) => c.group && [button("Redrive all…", () => redrive(where(c), all(c))), " ", button("Discard all…", () => discard(where(c), all(c), c.group), "danger")], "do"],
      ], counts.groups, "There are none.", (c) => `${c.topic} ${c.group}`),
      el("h2", {}, "Letters, oldest first"),
      table("Dead letters", [
        ["failed", (l) => when(l.ts ?? l.storedTs), "", "When the last attempt failed"], ["topic", (l) => topicLink(l.topic)], ["group", (l) => (l.group ? groupLink(l.topic, l.group) : none)],
        ["attempts", (l) => count(l.attempts), "n", "How often the event was delivered"], ["reason", (l) => (l.fault ? state(l.fault, "bad") : l.err ?? ""), "text"],
        ["event", (l) => el("code", {}, l.original?.id ?? ""), "id"],
        ["", (l) => [button("Show", () => shown("Dead letter", l)), " ", button("Redrive…", () => redrive({ topic: l.topic, id: l.id }, () => `the event ${l.original?.id ?? l.id}`)), " ", button("Discard…", () => discard({ topic: l.topic, id: l.id }, () => `the dead letter of ${l.original?.id ?? l.id}`), "danger")], "do"],
      ], list.letters, "There are none.", (l) => l.at),
      pager("letters", list.next),
    ];
  },
};

async function redrive(query, what) {
  const seen = await look("redrive", query);
  if (!seen) return;
  const to = el("select", { name: "to" }, options([["group", "to the group that failed"], ["topic", "to the topic, for all groups"]]));
  const values = await dialog("Redrive", [el("p", {}, `Delivers ${what(seen.matched)} again.`), field("Where", to)], { yes: "Redrive" });
  if (values) act("Redrive", () => change("redrive", { ...query, to: values.to, through: seen.through }, "Put back"));
}

async function discard(query, what, name) {
  const seen = await look("discard", query);
  if (seen && (await confirmed("Discard", `Removes ${what(seen.matched)} for good.`, "Discard", name))) {
    act("Discard", () => change("discard", { ...query, through: seen.through }, "Removed"));
  }
}

/** look counts the letters that a request means. Its through confines the request to them. */
async function look(how, query) {
  try {
    return await ask(["dlq", how], { method: "POST", query: { ...query, dryRun: "1" }, signal: AbortSignal.timeout(600000) });
  } catch (err) {
    say(`${how === "redrive" ? "Redrive" : "Discard"}: ${err.message}`, true);
    return null;
  }
}

async function change(how, query, did) {
  const done = await ask(["dlq", how], { method: "POST", query, signal: AbortSignal.timeout(600000) });
  return `${did} ${count(done.done)} of ${count(done.matched)}${done.skipped ? `; ${count(done.skipped)} skipped` : ""}.`;
}
