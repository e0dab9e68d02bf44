import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { connect, createClient, EventHubError, replay } from "eventhub-client";
import { eventually, newTopic, startHub } from "./hub.mjs";
import { jwt, secret } from "./jwt.mjs";
import { startProxy } from "./proxy.mjs";

let hub, proxy;
before(async () => {
  hub = await startHub([], { JWT_SECRET: secret, WS_TOKEN: "the hub's own token" });
  proxy = await startProxy(hub.websocket);
});
after(async () => {
  await proxy.stop();
  await hub.stop();
});

const fast = { minPauseMs: 5, maxPauseMs: 20 };
const open = (options = {}) => connect(hub.websocket, { token: hub.token, ...options });
async function stored(topic) {
  const events = [];
  for await (const event of replay(hub, topic)) events.push(event);
  return events;
}
const rejectsWith = (promise, code, retryable) =>
  assert.rejects(promise, (error) => error instanceof EventHubError && error.code === code && error.retryable === retryable);

test("publish resolves with the id of the stored event", async () => {
  const client = await open();
  const topic = newTopic();
  const id = await client.publish(topic, { n: 1 }, { key: "k", headers: { "x-a": "b" }, tags: ["t"], caused_by: ["c"], sid: "s", ts: 7 });
  const given = await client.publish(topic, "two", { id: "order-1" });
  assert.match(id, /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
  assert.equal(given, "order-1");
  assert.equal(await client.publish(topic, undefined, { id: "none" }), "none");
  const [first, second, third] = await stored(topic);
  assert.deepEqual(first, { id, ts: 7, topic, key: "k", sid: "s", headers: { "x-a": "b" }, caused_by: ["c"], tags: ["t"], payload: { n: 1 } });
  assert.equal(second.payload, "two");
  assert.equal(third.payload, null);
  await client.close();
});

test("a refused publish rejects with the code of the hub", async () => {
  const client = await open({ token: jwt(["publish:allowed.*"]) });
  await rejectsWith(client.publish("other", 1), "forbidden", false);
  await rejectsWith(client.publish("a..b", 1), "bad_topic", false);
  await rejectsWith(client.publish("allowed.x", 1, { ts: "yesterday" }), "bad_options", false);
  await rejectsWith(client.publish("allowed.x", "x".repeat(1_100_000)), "publish_failed", false);
  await rejectsWith(client.publish("allowed.x", "x".repeat(5_000_000)), "publish_failed", false);
  await rejectsWith(client.publish("allowed.x", 1n), "invalid", false);
  const cycle = {};
  cycle.self = cycle;
  await rejectsWith(client.publish("allowed.x", cycle), "invalid", false);
  assert.equal(client.pending, 0);
  await client.publish("allowed.x", "still works");
  await client.close();
});

test("publishMany keeps the order, and takes no more than it may have on their way", async () => {
  const client = await open();
  const topic = newTopic();
  let taken = 0;
  let most = 0;
  async function* source() {
    // Fewer than the hub takes at once: one that it refuses comes later.
    for (let i = 0; i < 1_500; i++) {
      taken++;
      most = Math.max(most, client.pending);
      yield { payload: i };
    }
  }
  const ids = await client.publishMany(topic, source(), { inFlight: 50 });
  assert.equal(ids.length, 1_500);
  assert.equal(taken, 1_500);
  assert.ok(most > 10 && most <= 50, `${most} at a time`);
  const events = await stored(topic);
  assert.deepEqual(events.map((e) => e.payload), Array.from({ length: 1_500 }, (_, i) => i));
  assert.deepEqual(events.map((e) => e.id), ids);
  await client.close();
});

test("publishMany stops at the first failure", async () => {
  const client = await open();
  const topic = newTopic();
  let taken = 0;
  function* source() {
    for (; taken < 1_000; taken++) yield { payload: taken, ...(taken === 20 ? { id: "" } : {}) };
  }
  await rejectsWith(client.publishMany(topic, source(), { inFlight: 10 }), "bad_options", false);
  assert.ok(taken >= 20 && taken <= 40, `${taken} were taken`);
  assert.equal(client.pending, 0);
  await client.close();
});

test("more publishes than the quota allows are all stored", async () => {
  const client = await open({ token: jwt(["publish:**"], 3600, { sub: "eager" }) });
  const topic = newTopic();
  const ids = await Promise.all(Array.from({ length: 8_000 }, (_, i) => client.publish(topic, i)));
  assert.equal(new Set(ids).size, 8_000);
  assert.equal(new Set((await stored(topic)).map((e) => e.id)).size, 8_000);
  await client.close();
});

test("without a connection, publishes wait in a bounded buffer", async () => {
  const client = createClient(proxy.url, { token: hub.token, bufferEvents: 3, bufferBytes: 1_000, ...fast });
  proxy.refuse(true);
  proxy.cut();
  const topic = newTopic();
  const some = [client.publish(topic, 1), client.publish(topic, 2), client.publish(topic, 3)];
  await rejectsWith(client.publish(topic, 4), "buffer_full", true);
  const other = createClient(proxy.url, { token: hub.token, bufferBytes: 1_000, ...fast });
  await rejectsWith(other.publish(topic, "x".repeat(1_000)), "buffer_full", true);
  await other.close({ timeoutMs: 0 });
  proxy.refuse(false);
  await Promise.all(some);
  assert.deepEqual((await stored(topic)).map((e) => e.payload), [1, 2, 3]);
  await client.close();
});

test("a publish in doubt is sent again, and stored once", async () => {
  const client = await connect(proxy.url, { token: hub.token, ...fast });
  const topic = newTopic();
  await client.publish(topic, 0);
  proxy.deafen(true); // the hub stores the event, and its answer is lost
  const doubtful = Promise.all([client.publish(topic, 1), client.publish(topic, 2)]);
  await eventually("the hub has stored both", async () => (await stored(topic)).length === 3);
  proxy.deafen(false);
  proxy.cut();
  const ids = await doubtful;
  const events = await stored(topic);
  assert.deepEqual(events.map((e) => e.payload), [0, 1, 2]);
  assert.deepEqual(events.slice(1).map((e) => e.id), ids);
  await client.close();
});

test("a publish in doubt beyond the duplicate window is outcome_unknown, and not sent again", async () => {
  const client = await connect(proxy.url, { token: hub.token, duplicateWindowMs: 300, ...fast });
  const topic = newTopic();
  await client.publish(topic, 0);
  proxy.deafen(true);
  const doubtful = client.publish(topic, 1);
  await eventually("the hub has stored it", async () => (await stored(topic)).length === 2);
  proxy.refuse(true);
  proxy.cut();
  await rejectsWith(doubtful, "outcome_unknown", false);
  proxy.refuse(false);
  proxy.deafen(false);
  await client.publish(topic, 2);
  assert.deepEqual((await stored(topic)).map((e) => e.payload), [0, 1, 2]);
  await client.close();
});

test("a signal takes back a publish that was not sent", async () => {
  proxy.refuse(true);
  const client = createClient(proxy.url, { token: hub.token, ...fast });
  const topic = newTopic();
  const abort = new AbortController();
  const waiting = client.publish(topic, "never", { signal: abort.signal });
  const kept = client.publish(topic, "kept");
  abort.abort(new Error("no longer wanted"));
  await rejectsWith(waiting, "aborted", false);
  await rejectsWith(client.publish(topic, 1, { signal: AbortSignal.abort() }), "aborted", false);
  proxy.refuse(false);
  await kept;
  assert.deepEqual((await stored(topic)).map((e) => e.payload), ["kept"]);
  await client.close();
});

test("a publish that was taken back holds neither room nor a close", async () => {
  const client = createClient("ws://127.0.0.1:1", { bufferEvents: 1, ...fast });
  for (let i = 0; i < 3; i++) {
    const abort = new AbortController();
    const waiting = client.publish("t", i, { signal: abort.signal });
    await rejectsWith(client.publish("t", "too many"), "buffer_full", true);
    abort.abort();
    await rejectsWith(waiting, "aborted", false);
    assert.equal(client.pending, 0);
  }
  const late = new Promise((resolve) => setTimeout(resolve, 8_000, "late").unref());
  assert.equal(await Promise.race([client.close(), late]), undefined);

  // The same for one that was sent, and whose connection broke.
  const other = await connect(proxy.url, { token: hub.token, ...fast });
  proxy.deafen(true);
  const abort = new AbortController();
  const topic = newTopic();
  const doubtful = other.publish(topic, 1, { signal: abort.signal });
  await eventually("the hub has stored it", async () => (await stored(topic)).length === 1);
  proxy.refuse(true);
  proxy.cut();
  await eventually("the client has noticed", () => other.state !== "ready");
  proxy.deafen(false);
  abort.abort();
  await rejectsWith(doubtful, "outcome_unknown", false);
  assert.equal(other.pending, 0);
  proxy.refuse(false);
  await other.ready();

  // And for one that is taken back before its connection breaks.
  proxy.deafen(true);
  const early = new AbortController();
  const second = other.publish(topic, 2, { signal: early.signal });
  await eventually("the hub has stored it", async () => (await stored(topic)).length === 2);
  early.abort();
  await rejectsWith(second, "outcome_unknown", false);
  proxy.refuse(true);
  proxy.cut();
  await eventually("the client has noticed", () => other.state !== "ready");
  assert.equal(other.pending, 0);
  await other.close();
  proxy.refuse(false);
  proxy.deafen(false);
});

test("close waits for publishes, and later ones are refused", async () => {
  const client = await open();
  const topic = newTopic();
  const publishes = Array.from({ length: 500 }, (_, i) => client.publish(topic, i));
  await client.close();
  await client.close();
  assert.equal((await Promise.all(publishes)).length, 500);
  await rejectsWith(client.publish(topic, 1), "closed", false);
  await rejectsWith(client.subscribe(topic, "g", () => {}), "closed", false);
  assert.equal(client.state, "closed");
});

test("a close that cannot drain says what is not known", async () => {
  const client = await connect(proxy.url, { token: hub.token, ...fast });
  proxy.deafen(true);
  const topic = newTopic();
  const doubtful = client.publish(topic, 1);
  doubtful.catch(() => {});
  await eventually("the hub has stored it", async () => (await stored(topic)).length === 1);
  proxy.refuse(true);
  proxy.cut();
  await eventually("the client has noticed", () => client.state !== "ready");
  const waiting = client.publish(newTopic(), 2);
  waiting.catch(() => {});
  await client.close({ timeoutMs: 50 });
  await rejectsWith(doubtful, "outcome_unknown", false);
  await rejectsWith(waiting, "closed", false);
  proxy.refuse(false);
  proxy.deafen(false);
});

test("payloads are checked by a schema, and what the schema makes of them is sent", async () => {
  const topic = newTopic();
  const order = {
    "~standard": {
      version: 1,
      vendor: "test",
      validate: (value) =>
        typeof value?.n === "number" ? { value: { n: value.n } } : { issues: [{ message: "must be a number", path: ["order", { key: "n" }] }] },
    },
  };
  const client = await open({ schemas: { [topic]: order } });
  await assert.rejects(client.publish(topic, { n: "1" }), { code: "invalid", message: "invalid payload: order.n: must be a number" });
  await client.publish(topic, { n: 1, extra: true });
  assert.deepEqual((await stored(topic)).map((e) => e.payload), [{ n: 1 }]);

  // An event that another client published is refused, and becomes a dead letter with the reason.
  const other = await open();
  const letters = [];
  await other.subscribe(`dlq.${topic}`, "operators", (event) => letters.push(event.payload));
  const handled = [];
  await client.subscribe(topic, "g", (event) => handled.push(event.payload), { from: "earliest", maxAttempts: 1 });
  await other.publish(topic, { n: "2" });
  await eventually("a dead letter", () => letters.length === 1);
  assert.equal(letters[0].err, "invalid payload: order.n: must be a number");
  assert.deepEqual(handled, [{ n: 1 }]);
  await client.close();
  await other.close();
});
