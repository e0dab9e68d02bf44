import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { connect, dedupe, latest, memoryStore, replay, snapshot } from "eventhub-client";
import { eventually, newTopic, startHub } from "./hub.mjs";

let hub, client;
before(async () => {
  hub = await startHub();
  client = await connect(hub.websocket, { token: hub.token });
});
after(async () => {
  await client.close();
  await hub.stop();
});

test("latest reads a key, and sees what was published before", async () => {
  const key = "vm:a/b c?#%:1";
  assert.equal(await latest(hub, "process.state", key), undefined);
  const id = await client.publish("process.state", { status: "alive" }, { key });
  assert.deepEqual((await latest(hub, "process.state", key)).id, id);
  await client.publish("process.state", null, { key, tombstone: true });
  assert.equal(await latest(hub, "process.state", key), undefined);
});

test("snapshot gives each key once, over several pages", async () => {
  const keys = Array.from({ length: 25 }, (_, i) => `snapshot:${i}`);
  await client.publishMany("process.state", keys.map((key) => ({ payload: key, key })));
  await eventually("the records are listed", async () => {
    const found = [];
    for await (const { key } of snapshot(hub, "process.state", { page: 10 })) found.push(key);
    assert.equal(new Set(found).size, found.length);
    return keys.every((key) => found.includes(key));
  });
  await client.publish("orders.placed", 1);
  await assert.rejects(snapshot(hub, "orders.placed").next(), { code: "bad_topic", retryable: false });
});

test("replay gives what is stored, over several pages", async () => {
  const topic = newTopic();
  const ids = await client.publishMany(topic, Array.from({ length: 25 }, (_, i) => ({ payload: i, headers: { "x-even": String(i % 2 === 0) } })));
  const all = async (opts) => {
    const events = [];
    for await (const event of replay(hub, topic, opts)) events.push(event.payload);
    return events;
  };
  const numbers = Array.from({ length: 25 }, (_, i) => i);
  assert.deepEqual(await all({ page: 10 }), numbers);
  assert.deepEqual(await all({ page: 5 }), numbers);
  assert.deepEqual(await all({ page: 10, limit: 12 }), numbers.slice(0, 12));
  assert.deepEqual(await all({ from: "afterId", afterId: ids[19] }), numbers.slice(20));
  assert.deepEqual(await all({ header: "x-even:true", page: 4 }), numbers.filter((n) => n % 2 === 0));
  await assert.rejects(all({ from: "ts" }), { code: "bad_options" });
});

test("a refused request has the code of the hub", async () => {
  await assert.rejects(latest({ ...hub, token: "wrong" }, "process.state", "k"), { code: "bad_token", retryable: false });
  await assert.rejects(latest({ http: hub.http }, "process.state", "k"), { code: "no_token" });
  assert.equal(await latest({ http: `${hub.http}/`, token: async () => hub.token }, "process.state", "no such key"), undefined);
});

test("dedupe handles an event once, and a failed one again", async () => {
  const topic = newTopic();
  const store = memoryStore(1_000);
  const handled = [];
  let failing = true;
  const handler = dedupe((event) => {
    if (event.payload === 2 && failing) {
      failing = false;
      throw new Error("the first time");
    }
    handled.push(event.payload);
  }, store);
  const subscription = await client.subscribe(topic, "g", handler);
  const [id] = await client.publishMany(topic, [{ payload: 1 }, { payload: 2 }]);
  await eventually("both", () => handled.length === 2);
  await subscription.drain();
  assert.equal(store.seen(topic, "g", id), true);
  assert.equal(store.seen(topic, "another group", id), false);
  // The group is gone back to its beginning: nothing is handled anew.
  const answer = await fetch(`${hub.ops}/groups/${topic}/g/cursor`, {
    method: "PUT",
    headers: { Authorization: `Bearer ${hub.token}` },
    body: JSON.stringify({ to: "earliest" }),
  });
  assert.equal(answer.status, 200);
  let came = 0;
  await client.subscribe(topic, "g", (event, delivery) => handler(event, delivery).then(() => came++));
  await eventually("both came again", () => came === 2);
  assert.deepEqual(handled.sort(), [1, 2]);
});

test("a store in memory is bounded, and forgets in time", () => {
  const store = memoryStore(2);
  for (const id of ["a", "b", "c"]) store.mark("t", "g", id, 1_000);
  assert.deepEqual(["a", "b", "c"].map((id) => store.seen("t", "g", id)), [false, true, true]);
  store.mark("t", "g", "c", -1);
  assert.equal(store.seen("t", "g", "c"), false);
});
