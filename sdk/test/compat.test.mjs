import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { EventClient, PromClient } from "eventhub-client/compat";
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
const fast = { minPauseMs: 5, maxPauseMs: 20 };

test("EventClient: calls right behind the constructor", async () => {
  const client = new EventClient(hub.websocket, hub.token);
  const topic = newTopic();
  const got = [];
  const joined = client.subscribe(topic, "ops", (event, ctx) => void got.push([event.payload, ctx.attempt, ctx.ack_deadline_ms > 1_000]), { from: "earliest", batchSize: 100 });
  const answer = await client.publish(topic, { pid: 1 }, { tags: ["#duck"] });
  assert.equal(answer.op, "OK");
  assert.equal((await joined).op, "OK");
  await eventually("the event", () => got.length === 1);
  assert.deepEqual(got, [[{ pid: 1 }, 1, true]]);
  client.modAck(topic, "ops", answer.id, 60_000); // it is settled: nothing happens
  assert.equal((await client.unsubscribe(topic, "ops")).op, "OK");
  await assert.rejects(client.unsubscribe(topic, "ops"), { code: "not_subscribed" });
  await client.close();
});

test("EventClient: a subscription is known from the call on, also to a handler that runs at once", async () => {
  const topic = newTopic();
  const first = new EventClient(hub.websocket, hub.token);
  const ids = await Promise.all(Array.from({ length: 20 }, (_, i) => first.publish(topic, i).then(({ id }) => id)));
  assert.equal(ids.length, 20);
  await first.subscribe(topic, "g", () => {}, { from: "earliest" });
  const client = new EventClient(hub.websocket, hub.token);
  const attempts = [];
  const handler = (event, ctx) => {
    attempts.push(ctx.attempt);
    client.modAck(topic, "early", event.id, 60_000);
  };
  const joined = client.subscribe(topic, "early", handler, { from: "earliest" });
  await eventually("the events", () => attempts.length >= 20);
  await joined;
  const again = client.subscribe(topic, "left", () => {});
  assert.equal((await client.unsubscribe(topic, "left")).op, "OK");
  assert.equal((await again).op, "OK");
  await client.close();
  await first.close();
  assert.deepEqual(attempts, Array(20).fill(1));
});

test("EventClient: a handler that throws at once refuses its event", async () => {
  const client = new EventClient(hub.websocket, hub.token);
  const topic = newTopic();
  const attempts = [];
  await client.subscribe(topic, "g", (_, ctx) => {
    attempts.push(ctx.attempt);
    if (ctx.attempt === 1) throw new Error("boom");
  });
  await client.publish(topic, 1);
  await eventually("a second attempt", () => attempts.length === 2);
  await client.close();
});

test("EventClient: a refused token rejects the calls, and ends no process", async () => {
  const client = new EventClient(hub.websocket, "wrong");
  await assert.rejects(client.publish("t", 1), { code: "bad_token" });
  await client.close();
});

test("PromClient: the first call connects", async () => {
  const client = new PromClient(hub.websocket, hub.token);
  const topic = newTopic();
  const got = [];
  await client.subscribe(topic, "browser", (event) => void got.push(event.payload), { maxInFlight: 10 });
  assert.equal(await client.publish(topic, { x: 1 }, { key: "k", headers: { a: "b" } }), undefined);
  await eventually("the event", () => got.length === 1);
  await client.unsubscribe(topic, "browser");
  client.close();
});

test("PromClient: what fails is seen", async () => {
  const refused = new PromClient(hub.websocket, "wrong");
  await assert.rejects(refused.connect(), { code: "bad_token" });
  await assert.rejects(refused.publish("t", 1), { code: "bad_token" });
  const client = new PromClient(hub.websocket, hub.token);
  await client.connect();
  await assert.rejects(client.publish("a..b", 1), { code: "bad_topic" });
  await assert.rejects(client.subscribe("t", "", () => {}), { code: "bad_group" });
  client.close();
  client.close();
});

test("both reconnect", async () => {
  const [event, prom] = [new EventClient(proxy.url, hub.token, fast), new PromClient(proxy.url, hub.token, fast)];
  const topic = newTopic();
  const got = { event: [], prom: [] };
  await event.subscribe(topic, "event", (e) => void got.event.push(e.payload));
  await prom.subscribe(topic, "prom", (e) => void got.prom.push(e.payload));
  for (let i = 0; i < 3; i++) {
    proxy.cut();
    await Promise.all([event.publish(topic, `event ${i}`), prom.publish(topic, `prom ${i}`)]);
  }
  await eventually("six events each", () => new Set(got.event).size === 6 && new Set(got.prom).size === 6);
  await event.close();
  prom.close();
});
