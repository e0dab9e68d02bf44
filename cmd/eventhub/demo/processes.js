// The table of processes: the newest state of each, as the projector publishes them.

import { $, el, write } from "./dom.js";

const SHOWN = 8;
const RECENT_MS = 2_500;
const KEPT = 500; // processes in memory
const decimal = new Intl.NumberFormat(undefined, { minimumFractionDigits: 1, maximumFractionDigits: 1 });

const states = new Map(); // by key: the payload, and when it came
const rows = new Map(); // by key: the row, and its cells
let came = 0;

/** take takes a change of process.state: the newest event of a key, or that the key is gone. */
export function take({ key, event, deleted }) {
  came++;
  const before = states.get(key);
  states.delete(key); // what comes last stands last
  if (deleted || event.payload === null) return;
  const heard = event.payload.status === "alive" || !before ? performance.now() : before.at;
  states.set(key, { payload: event.payload, at: heard });
  if (states.size > KEPT) states.delete(states.keys().next().value);
}

function makeRow() {
  const cells = {};
  const cell = (name, kind = "") => (cells[name] = el("td", { class: kind }));
  cells.status = el("span");
  cells.load = el("meter", { min: 0, max: 100, "aria-hidden": "true" });
  cells.cpu = el("span");
  const row = el("tr", {}, cell("name", "name"), el("td", {}, cells.status), cell("pid", "n more"), el("td", { class: "n" }, cells.load, cells.cpu), cell("memory", "n more"), cell("heard", "n"));
  return { row, cells };
}

function fill({ cells }, { payload, at }, key) {
  const stale = payload.status !== "alive";
  write(cells.name, String(payload.name ?? key));
  write(cells.status, String(payload.status ?? "unknown"));
  cells.status.className = `mark ${stale ? "bad" : "good"}`;
  write(cells.pid, String(payload.pid ?? ""));
  cells.load.value = stale ? 0 : Number(payload.cpu_pct) || 0;
  write(cells.cpu, stale ? "–" : `${decimal.format(Number(payload.cpu_pct) || 0)} %`);
  write(cells.memory, `${decimal.format(Number(payload.mem_mb) || 0)} MiB`);
  const seconds = Math.floor((performance.now() - at) / 1000);
  write(cells.heard, seconds < 1 ? "now" : `${seconds} s ago`);
}

/** draw shows the busiest processes, and below them those that were heard before. */
export function draw() {
  if (states.size === 0) return;
  // A process that is not among the busiest any more is not heard, and its figures are old.
  const now = performance.now();
  const rank = ({ payload, at }) => (now - at < RECENT_MS ? Number(payload.cpu_pct) || 0 : -1);
  const shown = [...states].sort(([, a], [, b]) => rank(b) - rank(a) || b.at - a.at).slice(0, SHOWN);
  const body = $("processes");
  const order = shown.map(([key, state]) => {
    if (!rows.has(key)) rows.set(key, makeRow());
    fill(rows.get(key), state, key);
    return rows.get(key).row;
  });
  const keys = new Set(shown.map(([key]) => key));
  for (const key of rows.keys()) if (!keys.has(key)) rows.delete(key);
  if (order.length !== body.children.length || order.some((row, i) => row !== body.children[i])) body.replaceChildren(...order);
  const hosts = new Set(shown.map(([, { payload }]) => payload.host));
  write($("host"), hosts.size === 1 ? String([...hosts][0]) : `${hosts.size} machines`);
  write($("rate"), `${came} events so far.`);
}
