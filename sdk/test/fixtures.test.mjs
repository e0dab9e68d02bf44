// Every frame of the hub that testdata/frames has, and every code of testdata/errors.json, goes
// through the client, over real sockets: the client understands it, or ignores it on purpose.
import assert from "node:assert/strict";
import { once } from "node:events";
import { readdirSync, readFileSync } from "node:fs";
import { createServer } from "node:http";
import { test } from "node:test";
import { WebSocketServer } from "ws";
import { broadcast } from "eventhub-client/broadcast";
import { clientCodes, createClient, EventHubError, hubCodes, hubOps, latest } from "eventhub-client";
import { eventually } from "./hub.mjs";

const root = new URL("../../testdata/", import.meta.url);
const read = (path) => readFileSync(new URL(path, root), "utf8");
const { codes, closes } = JSON.parse(read("errors.json"));

/** A server that says what a test wants, and a client of it. */
async function stage(t, options = {}) {
  const server = new WebSocketServer({ port: 0, host: "127.0.0.1", maxPayload: 8 * 2 ** 20 });
  await once(server, "listening");
  const url = `ws://127.0.0.1:${server.address().port}`;
  const s = { url, connections: 0, frames: [], say: undefined, answers: {} };
  server.on("connection", (socket) => {
    s.connections++;
    s.say = (text) => socket.send(text);
    s.close = (code, reason) => socket.close(code, reason);
    socket.on("message", (data) => {
      const frame = JSON.parse(data);
      s.frames.push(frame);
      // A test may answer the frames of an op itself.
      const answer = s.answers[frame.op] ?? (({ op, corr, opts }) => (op === "PUBLISH" ? { op: "OK", corr, id: opts.id } : { op: "OK", corr }));
      s.say(JSON.stringify(answer(frame)));
    });
  });
  const client = createClient(url, { token: "a token", retryMs: 0, minPauseMs: 1, maxPauseMs: 1, ...options });
  const told = [];
  client.on("error", (error) => told.push(error));
  client.on("notice", (notice) => told.push(notice));
  t.after(async () => {
    await client.close({ timeoutMs: 0 });
    for (const socket of server.clients) socket.terminate();
    server.close();
  });
  /** Resolves when the client has read everything that was said. */
  const heard = () => client.publish("heard", 1);
  return Object.assign(s, { client, told, heard, sent: (op) => s.frames.filter((frame) => frame.op === op) });
}

/** The text of a frame of a fixture, with values in the place of placeholders. */
function sample(want) {
  if (want === null || typeof want !== "object") return JSON.stringify(want);
  if (Array.isArray(want)) return `[${want.map(sample)}]`;
  const [[placeholder, of] = []] = Object.entries(want);
  switch (placeholder) {
    case "$uuidv7":
      return JSON.stringify(`01900000-0000-7000-8000-${of.padEnd(12, "0").slice(0, 12)}`);
    case "$bind":
    case "$ref":
      return JSON.stringify(`the id ${of}`);
    case "$int":
      return String(of[0]);
    case "$now":
      return String(Date.now());
    case "$any":
      return { string: '"any"', number: "7", boolean: "true", null: "null", object: "{}", array: "[]" }[of];
    case "$contains":
      return JSON.stringify(of);
    case "$raw":
      return of;
    case "$repeat":
      return JSON.stringify(of[0].repeat(of[1]));
  }
  return `{${Object.entries(want).map(([name, value]) => `${JSON.stringify(name)}:${sample(value)}`)}}`;
}

const fixtures = readdirSync(new URL("frames/", root))
  .filter((name) => name.endsWith(".json"))
  .map((name) => JSON.parse(read(`frames/${name}`).replaceAll("${token}", "a token").replaceAll("${topic}", "a_topic")))
  .map(({ name, steps }) => ({ name, frames: steps.flatMap(({ expect, expect_all = [] }) => (expect ? [expect, ...expect_all] : expect_all)).map(sample) }));

/** What the client makes of a frame, by its op. */
const understands = {
  /** The answer to a publish, if it has an id, and else to another frame. */
  async OK(s, { corr, id }, text) {
    if (corr === undefined) return ignores(s, text);
    if (id === undefined) return; // each SUBSCRIBE and PAUSE here gets one
    s.answers.PUBLISH = (frame) => ({ op: "OK", corr: frame.corr, id });
    assert.equal(await s.client.publish("t", 1), id);
    delete s.answers.PUBLISH;
  },

  /** The refusal of a publish, or something that nobody asked about. */
  async ERR(s, { code, msg, corr }, text) {
    assert.ok(code in hubCodes, code);
    if (corr === undefined) {
      s.say(text);
      await s.heard();
      const [error] = s.told.splice(0);
      assert.deepEqual([error.constructor, error.code, error.message], [EventHubError, code, msg]);
      return;
    }
    if (code === "unauthorized") return; // see below
    s.answers.PUBLISH = (asked) => ({ op: "ERR", code, msg, corr: asked.corr });
    await assert.rejects(s.client.publish("t", 1), { name: "EventHubError", code, message: msg, retryable: hubCodes[code] });
    delete s.answers.PUBLISH;
  },

  async EVENT(s, { topic, group, event, ctx }, text) {
    const came = [];
    if (group === undefined) {
      s.answers.SUBSCRIBE = (frame) => ({ op: "OK", corr: frame.corr, pos: "0-0", recovered: true });
      const made = await broadcast(s.client, topic, (...args) => void came.push(args));
      s.say(text);
      await s.heard();
      assert.deepEqual(came, [[event, { event, pos: ctx.pos, snapshot: false, tombstone: ctx.tombstone === true }]]);
      await made.unsubscribe();
      delete s.answers.SUBSCRIBE;
      s.frames.length = 0;
      return;
    }
    const subscription = await s.client.subscribe(topic, group, (...args) => void came.push(args), { topics: ["another"] });
    s.say(text);
    await s.heard();
    const [[got, delivery]] = came;
    assert.deepEqual(got, event);
    assert.deepEqual([delivery.topic, delivery.group, delivery.attempt, delivery.ack_deadline_ms], [topic, group, ctx.attempt, ctx.ack_deadline_ms]);
    await eventually("the acknowledgement", () => s.sent("ACK").some((ack) => ack.topic === topic && ack.group === group && ack.id === event.id));
    await subscription.unsubscribe();
    s.frames.length = 0;
  },
};

/** A frame that changes nothing. */
async function ignores(s, text) {
  s.say(text);
  await s.heard();
  assert.deepEqual(s.told, []);
  assert.equal(s.client.state, "ready");
  assert.equal(s.connections, 1);
}

for (const { name, frames } of fixtures) {
  test(`the client understands the hub in ${name}`, async (t) => {
    const s = await stage(t);
    await s.client.ready();
    for (const text of frames) {
      const frame = JSON.parse(text);
      if (frame.op in understands) await understands[frame.op](s, frame, text);
      else await ignores(s, text);
    }
    await ignores(s, '{"op":"AN_OP_OF_A_NEWER_HUB","corr":1}');
  });
}

test("the fixtures have every op of the hub", () => {
  const ops = new Set(fixtures.flatMap(({ frames }) => frames.map((text) => JSON.parse(text).op)));
  assert.deepEqual(hubOps.filter((op) => !ops.has(op)), []);
});

test("what is no frame changes nothing", async (t) => {
  const s = await stage(t);
  await s.client.ready();
  const subscription = await s.client.subscribe("t", "g", () => assert.fail("there is no event"));
  for (const text of ["", "no JSON", "[]", "7", '"text"', "{}", '{"op":7}', '{"op":"OK","corr":99}', '{"op":"OK","corr":"x"}']) await ignores(s, text);
  for (const text of ["null", '{"op":"EVENT"}', '{"op":"EVENT","topic":"t","group":"other","event":{},"ctx":{}}']) await ignores(s, text);
  assert.equal(subscription.active, 0);
});

// -- codes

/** These answer no request. */
const unasked = new Set(["events_lost", "group_reset"]);
/** The client repeats the request for these. */
const again = new Set(["unauthorized"]);

for (const { code, status, retry } of codes) {
  // Some codes have two meanings. The hub says so when the request is not to be repeated.
  const may = codes.some((other) => other.code === code && other.retry);

  test(`${code} (${status})`, async (t) => {
    const s = await stage(t);
    const refuse = (frame) => ({ op: "ERR", code, msg: "the reason", ...(may && !retry && { retryable: false }), corr: frame.corr });
    const error = { name: "EventHubError", code, message: "the reason", retryable: retry };
    assert.equal(new EventHubError(code, "").retryable, may);

    if (!unasked.has(code) && !again.has(code)) {
      s.answers.PUBLISH = refuse;
      await assert.rejects(s.client.publish("t", "small"), error);
      delete s.answers.PUBLISH;
    }
    if (!unasked.has(code) && status !== 413) {
      let times = 0;
      s.answers.SUBSCRIBE = (frame) => (++times === 1 ? refuse(frame) : { op: "OK", corr: frame.corr });
      const subscribed = s.client.subscribe("t", "g", () => {});
      if (again.has(code)) {
        await eventually("the answer", () => times === 1);
        s.close(1001); // a hub does not leave a connection whose token it has refused
      }
      if (retry || again.has(code)) await (await subscribed).unsubscribe();
      else await assert.rejects(subscribed, { ...error, retryable: false });
      assert.equal(times, retry || again.has(code) ? 2 : 1);
    }
    await s.heard();
  });

  test(`${code} (${status}) over HTTP`, async (t) => {
    const server = createServer((_, response) => response.writeHead(status, { connection: "close" }).end(JSON.stringify({ error: "the reason", code }))).listen(0, "127.0.0.1");
    await once(server, "listening");
    t.after(() => server.close());
    const asked = latest({ http: `http://127.0.0.1:${server.address().port}` }, "t", "k");
    if (code === "not_found") assert.equal(await asked, undefined);
    else await assert.rejects(asked, { name: "EventHubError", code, message: "the reason", retryable: may });
  });
}

for (const code of ["no_token", "bad_token", "jwt_invalid", "overloaded", "internal"]) {
  const { retry } = codes.find((one) => one.code === code);
  test(`AUTH that is refused with ${code}`, async (t) => {
    const s = await stage(t);
    let times = 0;
    s.answers.AUTH = ({ corr }) => (++times === 1 ? { op: "ERR", code, msg: "the reason", corr } : { op: "OK", corr });
    if (retry) await s.client.ready();
    else await assert.rejects(s.client.ready(), { code, message: "the reason", retryable: false });
    assert.equal(times, retry ? 2 : 1);
  });
}

for (const { code, name, reconnect } of closes) {
  test(`the close code ${code}, ${name}`, async (t) => {
    const s = await stage(t);
    await s.client.ready();
    const states = [];
    s.client.on("state", (state, error) => states.push([state, error?.code]));
    s.close(code, name);
    await eventually("the end", () => states.length > 0);
    assert.deepEqual(states[0], reconnect ? ["waiting", "connection_lost"] : ["failed", "gave_up"]);
    if (reconnect) await s.heard();
    else await assert.rejects(s.heard(), { code: "gave_up", message: new RegExp(`${code} ${name}`) });
  });
}

test("the codes of the client are none of the hub's", () => {
  const hub = new Set(codes.map(({ code }) => code));
  assert.deepEqual(Object.keys(clientCodes).filter((code) => hub.has(code)), []);
});
