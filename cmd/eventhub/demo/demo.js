// The demo: the newest states of processes, publishing, and members of groups.

import { $, el, short, showState, write } from "./dom.js";
import { watch } from "./eventhub.js";
import { open } from "./hub.js";
import * as members from "./members.js";
import * as processes from "./processes.js";

const DRAW_MS = 250;
const LINES = 4; // of what was published
const tab = Math.random().toString(36).slice(2, 6); // keeps the groups of tabs apart

const client = open();
let first = true;

/** why says why there is no connection. */
function why(error) {
  const named = /[^0-9.]/.test(location.hostname) && !/^\[|(^|\.)localhost$/.test(location.hostname);
  const hint = first && named && error.code === "connection_lost" ? ` The hub must have ${location.origin} in EVENTHUB_ORIGINS.` : "";
  return error.message + hint;
}

client.on("state", (state, error) => {
  showState($("state"), state);
  write($("why"), state !== "ready" && error ? why(error) : "");
  if (state !== "ready" || !first) return;
  first = false;
  for (const [group, auto] of [["workers", false], ["workers", false], ["audit", true]]) members.join("demo.greetings", `demo-${group}-${tab}`, auto);
});
const noProcesses = (error) => error && $("processes").replaceChildren(el("tr", {}, el("td", { colspan: 6, class: "bad" }, error.message)));
watch(client, "process.state", processes.take).then(({ closed }) => closed.then(noProcesses), noProcesses);

// -- publishing

/** say adds a line about publishes. */
function say(...text) {
  const list = $("published");
  list.prepend(el("li", {}, ...text));
  if (list.children.length > LINES) list.lastElementChild.remove();
}

$("publish").addEventListener("submit", async (e) => {
  e.preventDefault();
  const { topic, key, payload } = Object.fromEntries(new FormData(e.target));
  const many = Number(e.submitter?.value ?? 1);
  const bad = $("published-bad");
  let value;
  try {
    value = JSON.parse(payload);
  } catch (error) {
    write(bad, `The payload is not JSON: ${error.message}`);
    return;
  }
  // Events of a batch tell each other apart.
  const numbered = (n) => (many > 1 ? { n, ...(typeof value === "object" && !Array.isArray(value) ? value : { value }) } : value);
  const opts = key === "" ? {} : { key };
  const began = performance.now();
  const took = () => ` in ${Math.max(1, Math.round(performance.now() - began))} ms`;
  try {
    const ids = await client.publishMany(topic.trim(), Array.from({ length: many }, (_, i) => ({ payload: numbered(i + 1), ...opts })));
    write(bad, "");
    say(many === 1 ? el("code", {}, short(value)) : `${many} events`, " stored", took(), many === 1 ? [" as ", el("code", {}, ids[0])] : undefined);
  } catch (error) {
    write(bad, `${error.code ?? "error"}: ${error.message}`);
  }
});

// -- subscribing

const subscribe = $("subscribe");
subscribe.elements.group.value = `demo-workers-${tab}`;
subscribe.addEventListener("submit", (e) => {
  e.preventDefault();
  const { topic, group, auto } = Object.fromEntries(new FormData(subscribe));
  write($("joined-bad"), members.join(topic.trim(), group, auto !== undefined));
});

// Drawing at intervals keeps the page free, however many events come.
setInterval(() => {
  processes.draw();
  members.draw();
}, DRAW_MS);
