// What the client and the hub must agree on: testdata/errors.json, docs/asyncapi.yaml, and the
// conversations of testdata/frames, which run here over the client's own socket.
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import WebSocket from "ws";
import { caps, clientCodes, EventHubError, hubCodes, hubOps } from "eventhub-client";
import { broadcastOps } from "eventhub-client/broadcast";
import { givesUp } from "../dist/esm/errors.js";
import { openSocket } from "../dist/esm/socket.js";
import { newTopic, startHub } from "./hub.mjs";

const root = new URL("../../", import.meta.url);
const read = (path) => readFileSync(new URL(path, root), "utf8");

test("the codes are those of the hub, and say the same about another try", () => {
  const { codes, closes } = JSON.parse(read("testdata/errors.json"));
  const retry = {};
  for (const { code, retry: may } of codes) retry[code] = retry[code] || may;
  assert.deepEqual(hubCodes, retry);
  for (const { code, reconnect } of closes) assert.equal(givesUp(code), !reconnect, code);
  for (const code of Object.keys(clientCodes)) assert.equal(code in retry, false, code);
  assert.equal(new EventHubError("overloaded", "").retryable, true);
  assert.equal(new EventHubError("a code of a newer hub", "").retryable, false);
});

test("the frames are those that docs/asyncapi.yaml describes", () => {
  const text = read("docs/asyncapi.yaml");
  const messages = text.slice(text.indexOf("\n  messages:"), text.indexOf("\n  schemas:"));
  const names = [...messages.matchAll(/^ {4}([A-Z]+):$/gm)].map(([, name]) => name);
  const clientOps = ["AUTH", "PUBLISH", "SUBSCRIBE", "UNSUBSCRIBE", "ACK", "NACK", "MODACK", "PAUSE", "RESUME"];
  assert.deepEqual([...clientOps, ...hubOps, ...broadcastOps].sort(), names.sort());
  for (const cap of caps) assert.ok(text.includes(cap), cap);
});

// -- conversations

let hub;
before(async () => (hub = await startHub()));
after(() => hub.stop());

class Conversation {
  #inbox = [];
  #wake = () => {};
  #socket;

  static open(url) {
    const c = new Conversation();
    return new Promise((resolve, reject) => {
      c.#socket = openSocket(WebSocket, url, {
        opened: () => resolve(c),
        text: (data) => {
          c.#inbox.push(data);
          c.#wake();
        },
        ended: (code) => reject(new Error(`ended: ${code}`)),
      });
    });
  }
  send(text) {
    this.#socket.send(text);
  }
  async next() {
    const late = setTimeout(() => this.#wake(), 20_000);
    while (this.#inbox.length === 0) {
      const before = Date.now();
      await new Promise((resolve) => (this.#wake = resolve));
      if (this.#inbox.length === 0 && Date.now() - before > 15_000) throw new Error("no frame came");
    }
    clearTimeout(late);
    return this.#inbox.shift();
  }
  drop() {
    this.#socket.drop();
  }
}

/** Compares a value with what a fixture wants. New names are kept in fresh. */
function matches(want, got, names, fresh, raw) {
  if (want === null || typeof want !== "object") return Object.is(want, got);
  if (Array.isArray(want)) return Array.isArray(got) && want.length === got.length && want.every((w, i) => matches(w, got[i], names, fresh, raw));
  const [[placeholder, of] = []] = Object.entries(want);
  switch (placeholder) {
    case "$uuidv7":
    case "$bind":
      if (typeof got !== "string" || (placeholder === "$uuidv7" && !/^[0-9a-f]{8}-[0-9a-f]{4}-7/.test(got))) return false;
      if ((names[of] ?? fresh[of] ?? got) !== got) return false;
      fresh[of] = got;
      return true;
    case "$ref":
      return (names[of] ?? fresh[of]) === got;
    case "$int":
      return Number.isInteger(got) && got >= of[0] && got <= of[1];
    case "$now":
      return Number.isInteger(got) && Math.abs(got - Date.now()) <= of;
    case "$any":
      return of === (got === null ? "null" : Array.isArray(got) ? "array" : typeof got);
    case "$contains":
      return typeof got === "string" && got.toLowerCase().includes(of.toLowerCase());
    case "$raw":
      return raw.includes(of);
    case "$repeat":
      return got === of[0].repeat(of[1]);
  }
  const keys = Object.keys(want);
  return got !== null && typeof got === "object" && !Array.isArray(got) && keys.length === Object.keys(got).length && keys.every((k) => matches(want[k], got[k], names, fresh, raw));
}

const filled = (text, names) =>
  text
    .replace(/\{\s*"\$ref"\s*:\s*"(\w+)"\s*\}/g, (_, name) => JSON.stringify(names[name]))
    .replace(/\{\s*"\$repeat"\s*:\s*\["(.*?)",\s*(\d+)\]\s*\}/g, (_, x, n) => JSON.stringify(x.repeat(Number(n))));

async function run(scenario) {
  const names = {};
  const connections = new Map();
  const of = async (step) => {
    const name = step.conn ?? "main";
    if (!connections.has(name)) connections.set(name, await Conversation.open(hub.websocket));
    return connections.get(name);
  };
  const text = (frame) => filled(typeof frame === "string" ? frame : JSON.stringify(frame), names);
  for (const step of scenario.steps) {
    const conn = await of(step);
    if ("send" in step) conn.send(text(step.send));
    for (const frame of step.send_all ?? []) conn.send(text(frame));
    const wanted = "expect" in step ? [step.expect] : [...(step.expect_all ?? [])];
    while (wanted.length > 0) {
      const raw = await conn.next();
      const got = JSON.parse(raw);
      const at = wanted.findIndex((want) => {
        const fresh = {};
        if (!matches(want, got, names, fresh, raw)) return false;
        Object.assign(names, fresh);
        return true;
      });
      if (at < 0) assert.fail(`came: ${raw.slice(0, 500)}\nwanted: ${JSON.stringify(wanted).slice(0, 500)}`);
      wanted.splice(at, 1);
      if (got.op === "ERR") assert.ok(got.code in hubCodes, got.code);
      assert.ok([...hubOps, ...broadcastOps].includes(got.op), got.op);
    }
  }
  for (const conn of connections.values()) conn.drop();
}

// The steps that break a connection on purpose, and a hub with settings of its own, are for the
// runner of the hub.
const forTheHub = ["send_binary", "expect_close", "disconnect"];
// Long waits for a lease, a megabyte of one letter, numbers beyond what JSON.parse keeps, a quota.
const others = new Set(["topic_limit", "subscription_limit", "payload_bytes"]);

const scenarios = readdirSync(new URL("testdata/frames/", root))
  .filter((name) => name.endsWith(".json"))
  .map((name) => ({ name: name.slice(0, -5), source: read(`testdata/frames/${name}`) }))
  .filter(({ name, source }) => {
    const scenario = JSON.parse(source);
    return !others.has(name) && !scenario.config && !scenario.steps.some((step) => forTheHub.some((field) => field in step));
  });

test("most conversations run here", () => assert.ok(scenarios.length >= 45, `${scenarios.length}`));

for (const { name, source } of scenarios) {
  test(`conversation ${name}`, () => run(JSON.parse(source.replaceAll("${token}", hub.token).replaceAll("${topic}", newTopic().replace(".", "_")))));
}
