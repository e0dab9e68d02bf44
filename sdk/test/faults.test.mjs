// What goes wrong around a client: handlers, tokens, clocks and hubs that do what they should not.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { getEventListeners, once } from "node:events";
import { test } from "node:test";
import { PromClient } from "eventhub-client/compat";
import { EventHubError } from "eventhub-client";
import { WebSocketServer } from "ws";
import { eventually } from "./hub.mjs";
import { rig, Socket } from "./rig.mjs";

const rejectsWith = (promise, code) => assert.rejects(promise, (error) => error instanceof EventHubError && error.code === code);
const last = (op) => Socket.all.at(-1).sent.findLast((frame) => frame.op === op);
const answer = (op, frame) => Socket.all.at(-1).says({ corr: last(op).corr, ...frame });
const refuse = (op, code) => answer(op, { op: "ERR", code, msg: "" });
const sent = (op) => Socket.all.at(-1).sent.filter((frame) => frame.op === op);
const timers = () => process.getActiveResourcesInfo().filter((name) => name === "Timeout").length;

/** Fails when a promise is not settled in time. */
async function within(promise, otherwise, ms = 10_000) {
  let timer;
  const late = new Promise((_, reject) => (timer = setTimeout(() => reject(new Error(otherwise)), ms)));
  await Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

function event(id, { payload = 0, attempt = 1, deadline = 30_000 } = {}) {
  const record = { id, ts: 1, topic: "t", payload };
  return { op: "EVENT", topic: "t", group: "g", event: record, ctx: { attempt, ack_deadline_ms: deadline } };
}

/** A client with a subscription that the hub has accepted. */
async function member(handler, options) {
  const r = rig();
  await r.to.ready();
  const joined = r.client.subscribe("t", "g", handler, options);
  answer("SUBSCRIBE", { op: "OK" });
  return { ...r, subscription: await joined };
}

// -- publishing

test("close answers a publish that waits for another try", async () => {
  const { client, to } = rig();
  await to.ready();
  const publish = client.publish("t", 1);
  refuse("PUBLISH", "publish_failed");
  assert.equal(client.pending, 1);
  const refused = rejectsWith(publish, "outcome_unknown");
  await client.close({ timeoutMs: 0 });
  await within(refused, "the publish has no answer");
});

test("publishMany reports a failure while its source waits", async () => {
  const { client, to } = rig();
  await to.ready();
  let left = false;
  async function* source() {
    try {
      yield { payload: 1 };
      await new Promise((resolve) => setTimeout(resolve, 20_000).unref());
    } finally {
      left = true;
    }
  }
  const many = client.publishMany("t", source());
  const over = rejectsWith(many, "forbidden");
  await eventually("the event was sent", () => last("PUBLISH"));
  refuse("PUBLISH", "forbidden");
  await within(over, "publishMany waits for its source");
  assert.equal(left, false, "its source is told to end when it goes on");
  await client.close({ timeoutMs: 0 });
});

test("publishMany waits for the events on their way when its source fails", async () => {
  const { client, to } = rig();
  await to.ready();
  function* source() {
    yield { payload: 1 };
    yield { payload: 2 };
    throw new Error("the source failed");
  }
  let over = false;
  const many = assert.rejects(client.publishMany("t", source()), /the source failed/).finally(() => (over = true));
  await eventually("both were sent", () => sent("PUBLISH").length === 2);
  for (let i = 0; i < 20; i++) await new Promise((resolve) => setImmediate(resolve));
  assert.equal(over, false);
  for (const { corr, opts } of sent("PUBLISH")) Socket.all.at(-1).says({ op: "OK", corr, id: opts.id });
  await many;
  await client.close();
});

// -- handlers

test("whatever a handler throws refuses its event", async () => {
  const odd = [Object.create(null), Object.assign(new Error(), { message: { not: "text" } }), Symbol("s"), undefined, { then: 1 }];
  const { client } = await member((e) => {
    throw odd[e.payload];
  });
  for (let i = 0; i < odd.length; i++) Socket.all.at(-1).says(event(`e${i}`, { payload: i }));
  assert.deepEqual(sent("NACK").map(({ id }) => id), odd.map((_, i) => `e${i}`));
  for (const { reason } of sent("NACK")) assert.equal(typeof reason, "string");
  await client.close({ timeoutMs: 0 });
});

test("a handler may return any thenable", async () => {
  const odd = [
    {
      then: () => {
        throw new Error("from then");
      },
    },
    {
      then: (resolve, reject) => {
        resolve();
        resolve();
        reject(new Error("too late"));
      },
    },
  ];
  const { client, subscription } = await member((e) => odd[e.payload]);
  for (let i = 0; i < odd.length; i++) Socket.all.at(-1).says(event(`e${i}`, { payload: i }));
  await eventually("both are settled", () => last("NACK")?.id === "e0" && last("ACK")?.id === "e1");
  assert.equal(subscription.active, 0);
  await client.close({ timeoutMs: 0 });
});

test("no more handlers run than events may be held, also over a reconnect", async () => {
  let running = 0;
  const { client, subscription, to } = await member(() => {
    running++;
    return new Promise(() => {});
  }, { maxInFlight: 2 });
  for (const id of ["a", "b"]) Socket.all.at(-1).says(event(id));
  Socket.all.at(-1).breaks();
  await to.ready();
  answer("SUBSCRIBE", { op: "OK" });
  for (const id of ["c", "d"]) Socket.all.at(-1).says(event(id));
  assert.equal(running, 2);
  assert.equal(subscription.active, 4);
  await client.close({ timeoutMs: 0 });
});

test("times that are no numbers of milliseconds make no bad frames", async () => {
  const times = [NaN, Infinity, 1.5, -1];
  const { client } = await member((e, delivery) => {
    assert.equal(delivery.extend(times[e.payload]), true);
    assert.equal(delivery.nack("later", times[e.payload]), true);
  });
  for (let i = 0; i < times.length; i++) Socket.all.at(-1).says(event(`e${i}`, { payload: i }));
  const most = 43_200_000;
  assert.deepEqual(sent("MODACK").map((frame) => frame.extend_ms), [0, most, 2, 0]);
  assert.deepEqual(sent("NACK").map((frame) => frame.delay_ms), [undefined, most, 2, undefined]);
  await client.close({ timeoutMs: 0 });
});

// -- clocks

for (const [name, shift] of [["back", -3_600_000], ["forward", 3_600_000]]) {
  test(`a lease is prolonged when the clock is set ${name}`, async (t) => {
    const now = Date.now;
    t.after(() => (Date.now = now));
    const { client } = await member(() => new Promise(() => {}), { ackTimeoutMs: 1_000 });
    Socket.all.at(-1).says(event("e", { deadline: 1_000 }));
    Date.now = () => now() + shift;
    const until = performance.now() + 5_000;
    while (!last("MODACK") && performance.now() < until) await new Promise((resolve) => setTimeout(resolve, 10));
    assert.equal(last("MODACK")?.id, "e");
    await client.close({ timeoutMs: 0 });
  });
}

test("a clock that is far ahead does not make the client ask for tokens again and again", async () => {
  const part = (value) => Buffer.from(JSON.stringify(value)).toString("base64url");
  const seconds = Math.floor(Date.now() / 1000);
  let asked = 0;
  // Issued an hour ago by this clock, for half an hour; the hub takes them.
  const token = () => `${part({})}.${part({ iat: seconds - 3_600, exp: seconds - 1_800, jti: asked++ })}.`;
  class Hub extends Socket {
    constructor(url) {
      super(url);
      setImmediate(() => this.opens());
    }
    send(text) {
      super.send(text);
      const { corr } = JSON.parse(text);
      setImmediate(() => this.says({ op: "OK", corr }));
    }
  }
  const { client } = rig({ token, WebSocket: Hub });
  await client.ready();
  await new Promise((resolve) => setTimeout(resolve, 300));
  assert.ok(asked <= 3, `${asked} tokens in 300 ms`);
  await client.close();
});

// -- ends

test("a refused UNSUBSCRIBE or PAUSE ends no process", async () => {
  const seen = [];
  const note = (error) => seen.push(error);
  process.on("unhandledRejection", note);
  const abort = new AbortController();
  const { client, turn } = await member(() => {}, { signal: abort.signal });
  abort.abort();
  refuse("UNSUBSCRIBE", "internal");
  const other = client.subscribe("t", "h", () => {});
  answer("SUBSCRIBE", { op: "OK" });
  const drained = (await other).drain().catch(() => {});
  refuse("PAUSE", "overloaded");
  await eventually("it unsubscribes", () => last("UNSUBSCRIBE").group === "h");
  refuse("UNSUBSCRIBE", "internal");
  await drained;
  for (let i = 0; i < 5; i++) await turn();
  process.off("unhandledRejection", note);
  assert.deepEqual(seen, []);
  await client.close({ timeoutMs: 0 });
});

test("nothing of a closed client keeps a process alive", async () => {
  const before = timers();
  const { client, to } = rig();
  await to.ready();
  void client.subscribe("t", "g", () => {}).catch(() => {});
  refuse("SUBSCRIBE", "overloaded"); // it is tried again later
  void client.publish("t", 1).catch(() => {});
  refuse("PUBLISH", "publish_failed"); // so is this
  void client.publish("t", 2).catch(() => {});
  refuse("PUBLISH", "rate_limited");
  assert.ok(timers() > before);
  await client.close({ timeoutMs: 0 });
  assert.equal(timers(), before);
});

test("ready leaves nothing behind on a signal", async () => {
  const { client, to } = rig();
  const { signal } = new AbortController();
  const ready = client.ready(signal);
  await to.ready();
  await ready;
  assert.equal(getEventListeners(signal, "abort").length, 0);
  await client.close();
});

test("PromClient: close also ends a connection that is not there yet", async () => {
  Socket.all = [];
  const client = new PromClient("ws://hub", "token", { WebSocket: Socket });
  const connecting = rejectsWith(client.connect(), "closed");
  await eventually("it dials", () => Socket.all.length === 1);
  client.close();
  await within(connecting, "it goes on");
  assert.equal(Socket.all[0].closed, true);
});

test("a process ends soon after close, though its hub does not answer", async (t) => {
  const server = new WebSocketServer({ port: 0, host: "127.0.0.1" });
  t.after(() => {
    for (const ws of server.clients) ws.terminate();
    server.close();
  });
  await once(server, "listening");
  server.on("connection", (ws) =>
    ws.on("message", (data) => {
      ws.send(JSON.stringify({ op: "OK", corr: JSON.parse(data).corr }));
      ws.pause(); // from now on it reads nothing, as a machine that has frozen
    }),
  );
  const program = `
    import { connect } from "eventhub-client";
    import WebSocket from "ws";
    const client = await connect("ws://127.0.0.1:${server.address().port}", { token: "t", WebSocket });
    await client.close();`;
  const child = spawn(process.execPath, ["--input-type=module", "-e", program], { cwd: new URL("..", import.meta.url), stdio: ["ignore", "ignore", "inherit"] });
  const began = performance.now();
  const [code] = await once(child, "exit");
  assert.equal(code, 0);
  // ws alone waits for 30 seconds.
  assert.ok(performance.now() - began < 25_000, `${performance.now() - began} ms`);
});
