// Broadcasts and watches, of real hubs.
import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { isDeepStrictEqual } from "node:util";
import { connect } from "eventhub-client";
import { broadcast, events, watch } from "eventhub-client/broadcast";
import { eventually, newTopic, startHub } from "./hub.mjs";
import { cutOnce, startProxy } from "./proxy.mjs";

const dir = mkdtempSync(join(tmpdir(), "eventhub-broadcast-"));
let hub, proxy;
before(async () => {
  const topics = join(dir, "topics.yaml");
  writeFileSync(topics, 'topics:\n  - pattern: "c.*"\n    compaction: true\n  - pattern: "room.*"\n    presence: true\n');
  hub = await startHub([`--topics=${topics}`]);
  proxy = await startProxy(hub.websocket);
});
after(async () => {
  await proxy.stop();
  await hub.stop();
  rmSync(dir, { recursive: true });
});

const compacted = () => `c.${newTopic().slice(2)}`;
const numbers = (n, first = 1) => Array.from({ length: n }, (_, i) => ({ payload: first + i }));

async function open(t, url = hub.websocket, options = {}) {
  const client = await connect(url, { token: hub.token, minPauseMs: 5, maxPauseMs: 20, ...options });
  t.after(() => client.close({ timeoutMs: 0 }));
  return client;
}

/** A promise that is resolved from outside. */
function gate() {
  let open;
  const opened = new Promise((resolve) => (open = resolve));
  return { open, opened };
}

test("every client gets every event, in order and with its place", async (t) => {
  const topic = newTopic();
  const clients = await Promise.all([open(t), open(t), open(t)]);
  const got = clients.map(() => []);
  await clients[0].publish(topic, 0);
  await Promise.all(clients.map((client, i) => broadcast(client, topic, (event, cast) => void got[i].push([event.payload, cast.pos, cast.snapshot, cast.tombstone]))));
  await clients[0].publishMany(topic, numbers(200));
  for (const list of got) {
    await eventually("all events", () => list.length === 200);
    assert.deepEqual(list.map(([n]) => n), numbers(200).map(({ payload }) => payload));
    assert.equal(new Set(list.map(([, pos]) => pos)).size, 200);
    assert.ok(list.every(([, , snapshot, tombstone]) => !snapshot && !tombstone));
  }
  assert.deepEqual(got[1], got[0]);
  const [, pos] = got[0][99];
  const rest = [];
  await broadcast(await open(t), topic, (event) => void rest.push(event.payload), { from: "pos", pos });
  await eventually("the rest", () => rest.length === 100);
  assert.equal(rest[0], 101);
  const last = [];
  await broadcast(await open(t), topic, (event) => void last.push(event.payload), { history: 3 });
  await eventually("the history", () => last.length === 3);
  assert.deepEqual(last, [198, 199, 200]);
});

test("a broadcast and a group of one topic do not mix", async (t) => {
  const topic = newTopic();
  const client = await open(t);
  const cast = [];
  const mine = [];
  const made = await broadcast(client, topic, (event) => void cast.push(event.payload));
  await client.subscribe(topic, "g", (event) => void mine.push(event.payload));
  await assert.rejects(broadcast(client, topic, () => {}), { code: "already_subscribed" });
  await client.publishMany(topic, numbers(50));
  await eventually("both have all", () => cast.length === 50 && mine.length === 50);
  await made.unsubscribe();
  assert.equal(await made.closed, undefined);
  await client.publish(topic, 51);
  await eventually("the group has it", () => mine.length === 51);
  assert.equal(cast.length, 50);
  await (await broadcast(client, topic, () => {})).unsubscribe();
});

test("a broadcast goes on behind the last event after a reconnect", async (t) => {
  const topic = newTopic();
  const client = await open(t, proxy.url);
  const publisher = await open(t);
  const got = [];
  const lost = [];
  await broadcast(client, topic, (event) => void got.push(event.payload), { onGap: (gap) => void lost.push(gap), onReset: (reset) => void lost.push(reset) });
  for (let i = 0; i < 5; i++) {
    const publishing = publisher.publishMany(topic, numbers(100, i * 100 + 1));
    await cutOnce(proxy, client);
    await publishing;
  }
  await eventually("all events", () => got.length >= 500);
  assert.deepEqual(got, numbers(500).map(({ payload }) => payload));
  assert.deepEqual(lost, []);
});

test("what a slow handler misses is told in its place", async (t) => {
  const topic = newTopic();
  const client = await open(t);
  const first = gate();
  const got = [];
  const handler = (event) => {
    got.push(event.payload);
    return event.payload === 1 ? first.opened : undefined;
  };
  await broadcast(client, topic, handler, { queueEvents: 10, onGap: ({ missed }) => void got.push(`${missed} missed`) });
  await client.publishMany(topic, numbers(100), { inFlight: 1 });
  const other = [];
  await broadcast(await open(t), topic, (event) => void other.push(event.payload), { history: 1 });
  await eventually("the newest came", () => other.includes(100));
  const turn = gate();
  setImmediate(turn.open);
  await turn.opened;
  first.open();
  await eventually("the newest was handled", () => got.includes(100));
  const events = got.filter((n) => typeof n === "number");
  const missed = got.filter((n) => typeof n === "string").reduce((sum, text) => sum + Number.parseInt(text, 10), 0);
  assert.equal(events.length + missed, 100, got.join(" "));
  assert.ok(missed > 0);
  assert.deepEqual(events, events.toSorted((a, b) => a - b));
});

test("catchup misses nothing, and close ends the broadcast", async (t) => {
  const topic = newTopic();
  const errors = [];
  const client = await open(t);
  client.on("error", (error) => errors.push(error.code));
  const other = await open(t);
  const first = gate();
  const got = [];
  const wait = (event) => (event.payload === 1 ? first.opened : undefined);
  await broadcast(other, topic, (event) => {
    got.push(event.payload);
    return wait(event);
  }, { queueEvents: 10, slow: "catchup" });
  const closing = await broadcast(client, topic, wait, { queueEvents: 10, slow: "close" });
  await client.publishMany(topic, numbers(500));
  const error = await closing.closed;
  assert.deepEqual([error.code, error.retryable], ["buffer_full", false]);
  assert.deepEqual(errors, ["buffer_full"]);
  first.open();
  await eventually("all events", () => got.length === 500);
  assert.deepEqual(got, numbers(500).map(({ payload }) => payload));
});

test("a newer event of a key replaces one that waits", async (t) => {
  const topic = newTopic();
  const client = await open(t);
  const first = gate();
  const got = [];
  await broadcast(client, topic, (event) => {
    got.push(`${event.key} ${event.payload}`);
    return event.key === "first" ? first.opened : undefined;
  }, { conflate: "key", queueEvents: 10 });
  await client.publish(topic, 0, { key: "first" });
  await eventually("the handler waits", () => got.length === 1);
  for (let n = 1; n <= 20; n++) for (const key of ["a", "b"]) await client.publish(topic, n, { key });
  const other = [];
  await broadcast(await open(t), topic, (event) => void other.push(event.payload), { history: 1 });
  await eventually("the newest came", () => other.length === 1);
  first.open();
  await eventually("the newest of each", () => got.includes("a 20") && got.includes("b 20"));
  assert.ok(got.length < 41, got.join());
});

test("a failing handler does not end the broadcast", async (t) => {
  const topic = newTopic();
  const client = await open(t);
  const errors = [];
  client.on("error", ({ code, cause }) => errors.push([code, cause.message]));
  const got = [];
  await broadcast(client, topic, (event) => {
    got.push(event.payload);
    if (event.payload === 1) throw new Error("one");
    return event.payload === 2 ? Promise.reject(new Error("two")) : undefined;
  });
  await client.publishMany(topic, numbers(3), { inFlight: 1 });
  await eventually("all were handled", () => got.length === 3);
  assert.deepEqual(errors, [["handler_failed", "one"], ["handler_failed", "two"]]);
});

test("a broadcast of a topic that is deleted says so", async (t) => {
  const topic = newTopic();
  const client = await open(t);
  client.on("error", () => {});
  await client.publish(topic, 1);
  const made = await broadcast(client, topic, () => {});
  const response = await fetch(`${hub.ops}/topics/${topic}`, { method: "DELETE", headers: { authorization: `Bearer ${hub.token}` } });
  assert.ok(response.ok, response.status);
  assert.equal((await made.closed).code, "not_subscribed");
});

test("bad options are refused at once", async (t) => {
  const client = await open(t);
  await assert.rejects(broadcast(client, newTopic(), () => {}, { queueEvents: 0 }), { code: "bad_options" });
  await assert.rejects(broadcast(client, newTopic(), () => {}, { history: 1_001 }), { code: "bad_options" });
  await assert.rejects(broadcast(client, newTopic(), () => {}, { snapshot: true }), { code: "bad_topic" });
  await assert.rejects(broadcast(client, newTopic(), () => {}, { signal: AbortSignal.abort() }), { code: "aborted" });
  const stop = new AbortController();
  const made = await broadcast(client, newTopic(), () => {}, { signal: stop.signal });
  stop.abort();
  assert.equal(await made.closed, undefined);
});

test("close lets the handler finish", async () => {
  const topic = newTopic();
  const client = await connect(hub.websocket, { token: hub.token });
  const [begun, end] = [gate(), gate()];
  let done = false;
  await broadcast(client, topic, async () => {
    begun.open();
    await end.opened;
    done = true;
  });
  await client.publish(topic, 1);
  await begun.opened;
  const closed = client.close();
  end.open();
  await closed;
  assert.ok(done);
});

test("for await gives the events, and leaving the loop ends the broadcast", async (t) => {
  const topic = newTopic();
  const client = await open(t);
  await client.publishMany(topic, numbers(5), { inFlight: 1 });
  const got = [];
  for await (const { event } of events(client, topic, { history: 5 })) {
    got.push(event.payload);
    if (got.length === 5) break;
  }
  assert.deepEqual(got, [1, 2, 3, 4, 5]);
  await (await broadcast(client, topic, () => {})).unsubscribe(); // there is none any more
});

test("presence tells who comes and goes", async (t) => {
  const topic = `room.${newTopic().slice(2)}`;
  const told = [];
  const client = await open(t);
  await broadcast(client, topic, () => {}, { onPresence: (presence) => void told.push(presence) });
  await eventually("the hub's own name is there", () => told.at(-1)?.count === 1);
});

test("a watch gives the state, then each change, and the state again after a reset", async (t) => {
  const topic = compacted();
  const publisher = await open(t);
  const put = (key, payload) => publisher.publish(topic, payload, { key });
  const remove = (key) => publisher.publish(topic, null, { key, tombstone: true });
  await put("a", 1);
  await put("b", 2);
  await put("none", null);
  await remove("b");
  const client = await open(t, proxy.url);
  const state = new Map();
  let current = 0;
  const resets = [];
  const change = ({ key, event, deleted }) => {
    if (deleted) assert.ok(state.delete(key), key);
    else state.set(key, event.payload);
  };
  await watch(client, topic, change, { onCurrent: () => void current++, onReset: ({ reason }) => void resets.push(reason) });
  // the newest changes may come behind the snapshot
  await eventually("the state", () => current === 1 && isDeepStrictEqual(Object.fromEntries(state), { a: 1, none: null }));
  await put("a", 3);
  await put("c", 4);
  await remove("none");
  await eventually("the changes", () => state.get("c") === 4 && !state.has("none"));
  assert.equal(state.get("a"), 3);
  proxy.refuse(true);
  proxy.cut();
  await put("a", 5);
  await remove("c");
  proxy.refuse(false);
  await eventually("what changed meanwhile", () => state.get("a") === 5 && !state.has("c"));
  assert.deepEqual([current, resets], [1, []]); // it went on where it was
});

test("a watch whose handler is slow gets the newest values", async (t) => {
  const topic = compacted();
  const publisher = await open(t);
  for (let key = 0; key < 20; key++) await publisher.publish(topic, 0, { key: `k${key}` });
  const first = gate();
  const state = new Map();
  let calls = 0;
  const client = await open(t);
  await watch(client, topic, ({ key, event, deleted }) => {
    if (deleted) state.delete(key);
    else state.set(key, event.payload);
    return ++calls === 21 ? first.opened : undefined;
  });
  await eventually("the state", () => calls === 20);
  for (let n = 1; n <= 50; n++) await publisher.publishMany(topic, Array.from({ length: 20 }, (_, key) => ({ payload: n, key: `k${key}` })));
  await publisher.publish(topic, null, { key: "k0", tombstone: true });
  first.open();
  await eventually("the newest values", () => !state.has("k0") && state.size === 19 && [...state.values()].every((n) => n === 50));
  assert.ok(calls < 1_021, calls);
});

test("a watch of more keys than it may have ends", async (t) => {
  const topic = compacted();
  const client = await open(t);
  client.on("error", () => {});
  for (const key of ["a", "b", "c"]) await client.publish(topic, 1, { key });
  const made = await watch(client, topic, () => {}, { maxKeys: 2 });
  assert.equal((await made.closed).code, "buffer_full");
});
