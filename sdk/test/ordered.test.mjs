// Ordered groups: slots, and one event of a key at a time.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { connect } from "eventhub-client";
import { eventually, newTopic, startHub } from "./hub.mjs";
import { startProxy } from "./proxy.mjs";

let hub, proxy;
before(async () => {
  hub = await startHub();
  proxy = await startProxy(hub.websocket);
});
after(async () => {
  await proxy.stop();
  await hub.stop();
});

const keys = Array.from({ length: 40 }, (_, i) => `key-${i}`);
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** A client whose newest slots of each topic are known. */
async function member(url, options = {}) {
  const client = await connect(url, { token: hub.token, minPauseMs: 5, maxPauseMs: 20, ...options });
  const slots = {};
  const epochs = {};
  let told = 0;
  client.on("assign", ({ topic, slots: all, epoch }) => {
    assert.ok(!(epoch <= epochs[topic]), `epoch ${epoch} after ${epochs[topic]}`);
    epochs[topic] = epoch;
    slots[topic] = all;
    told++;
  });
  return { client, slots, told: () => told };
}

test("a member has the slots of its events, on each of its topics", async () => {
  const [topic, more] = [newTopic(), newTopic()];
  const { client, slots } = await member(hub.websocket);
  const got = [];
  await client.subscribe(topic, "g", (event) => void got.push([event.key, slots[event.topic]?.includes(event.partition), event.partition === undefined]), {
    ordered: "key",
    slots: 8,
    topics: [more],
  });
  for (const to of [topic, more]) await client.publishMany(to, [...keys.map((key) => ({ payload: 1, key })), { payload: 1 }]);
  await eventually("all events came", () => got.length === 2 * (keys.length + 1));
  for (const [key, has, none] of got) assert.deepEqual([has, none], key ? [true, false] : [false, true], key);
  assert.deepEqual(slots[topic], [0, 1, 2, 3, 4, 5, 6, 7]);
  await client.close();
});

test("members share the slots, and the events of a key come one at a time and in order", async () => {
  const topic = newTopic();
  const a = await member(hub.websocket);
  const b = await member(hub.websocket);
  const each = 20;
  const last = new Map();
  const busy = new Set();
  const wrong = [];
  let done = 0;
  const handler = (who) => async (event) => {
    const key = event.key;
    if (busy.has(key)) wrong.push(`two events of ${key} at a time`);
    busy.add(key);
    if (!who.slots[topic].includes(event.partition)) wrong.push(`${key} of another's slot ${event.partition}`);
    if (event.payload !== (last.get(key) ?? 0) + 1) wrong.push(`${key}: ${event.payload} after ${last.get(key)}`);
    await pause(Math.random() * 4);
    last.set(key, event.payload);
    busy.delete(key);
    done++;
  };
  const options = { ordered: "key", concurrency: 16 };
  const first = await a.client.subscribe(topic, "g", handler(a), options);
  await b.client.subscribe(topic, "g", handler(b), options);
  await eventually("each has half of the slots", () => a.slots[topic]?.length === 32 && b.slots[topic]?.length === 32);
  const publishing = (async () => {
    for (let n = 1; n <= each; n++) await a.client.publishMany(topic, keys.map((key) => ({ payload: n, key })));
  })();
  await eventually("events came", () => done > keys.length * 4);
  await first.drain();
  await eventually("the other has all slots", () => b.slots[topic].length === 64);
  await publishing;
  await eventually("all events were handled", () => done === each * keys.length);
  assert.deepEqual(wrong, []);
  await a.client.close();
  await b.client.close();
});

test("a member is told its slots again after a reconnect", async () => {
  const topic = newTopic();
  const { client, slots, told } = await member(proxy.url);
  const got = [];
  await client.subscribe(topic, "g", (event) => void got.push(event.payload), { ordered: "key", slots: 2 });
  await eventually("the slots are known", () => slots[topic]?.length === 2);
  const before = told();
  proxy.cut();
  await eventually("the slots are told again", () => told() > before && slots[topic].length === 2);
  await client.publish(topic, "after", { key: "k" });
  await eventually("the event came", () => got.includes("after"));
  await client.close();
});

test("a member that takes an ordered group for another is refused at once", async () => {
  const topic = newTopic();
  const [one, two] = await Promise.all([1, 2].map(() => connect(hub.websocket, { token: hub.token })));
  await one.subscribe(topic, "ordered", () => {}, { ordered: "key" });
  await one.subscribe(topic, "plain", () => {});
  const refused = { name: "EventHubError", code: "subscribe_failed", retryable: false };
  await assert.rejects(two.subscribe(topic, "ordered", () => {}), refused);
  await assert.rejects(two.subscribe(topic, "plain", () => {}, { ordered: "key" }), refused);
  await one.close();
  await two.close();
});
