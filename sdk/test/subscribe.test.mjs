import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { connect, EventHubError } from "eventhub-client";
import { eventually, newTopic, startHub } from "./hub.mjs";
import { cutOnce, startProxy } from "./proxy.mjs";

let hub, proxy, client;
before(async () => {
  hub = await startHub();
  proxy = await startProxy(hub.websocket);
  client = await connect(hub.websocket, { token: hub.token });
});
after(async () => {
  await client.close();
  await proxy.stop();
  await hub.stop();
});

const fast = { minPauseMs: 5, maxPauseMs: 20 };
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** How many events of a group are not settled. */
async function unsettled(topic, group) {
  const answer = await fetch(`${hub.ops}/groups/${topic}/${encodeURIComponent(group)}`, { headers: { Authorization: `Bearer ${hub.token}` } });
  const { pending, inflight } = await answer.json();
  return pending + inflight;
}
const settled = (topic, group) => eventually(`${group} has settled everything`, async () => (await unsettled(topic, group)) === 0);

/** A promise that is settled from outside. */
function gate() {
  let open;
  const promise = new Promise((resolve) => (open = resolve));
  return { promise, open };
}

test("the end of a handler acknowledges its event", async () => {
  const topic = newTopic();
  const got = [];
  await client.subscribe(topic, "sync", (event, delivery) => void got.push([event.payload, delivery.attempt, delivery.topic, delivery.group]));
  await client.subscribe(topic, "async", async () => pause(1));
  await client.publish(topic, 1);
  await client.publish(topic, 2);
  await settled(topic, "sync");
  await settled(topic, "async");
  assert.deepEqual(got, [
    [1, 1, topic, "sync"],
    [2, 1, topic, "sync"],
  ]);
});

test("what a handler throws, at once or later, refuses its event", async () => {
  const topic = newTopic();
  const letters = [];
  await client.subscribe(`dlq.${topic}`, "operators", (event) => letters.push([event.payload.group, event.payload.err, event.payload.attempts]));
  const throwing = () => {
    throw new Error("at once");
  };
  await client.subscribe(topic, "throws", throwing, { maxAttempts: 2 });
  await client.subscribe(topic, "rejects", () => Promise.reject("later"), { maxAttempts: 2 });
  await client.publish(topic, 1);
  await eventually("two dead letters", () => letters.length === 2);
  assert.deepEqual(letters.sort(), [
    ["rejects", "later", 2],
    ["throws", "at once", 2],
  ]);
});

test("a handler may settle its event itself", async () => {
  const topic = newTopic();
  const got = [];
  await client.subscribe(topic, "g", (event, delivery) => {
    got.push(delivery.attempt);
    if (delivery.attempt === 1) assert.equal(delivery.nack("not now", 0), true);
    else assert.equal(delivery.ack(), true);
    assert.equal(delivery.ack(), false);
    assert.equal(delivery.nack(), false);
  });
  await client.publish(topic, 1);
  await settled(topic, "g");
  assert.deepEqual(got, [1, 2]);
});

test("with manual acknowledgement, an event is open until it is settled", async () => {
  const topic = newTopic();
  const got = [];
  await client.subscribe(topic, "g", (_, delivery) => got.push(delivery), { ack: "manual" });
  for (let i = 0; i < 3; i++) await client.publish(topic, i);
  await eventually("three events", () => got.length === 3);
  assert.equal(await unsettled(topic, "g"), 3);
  assert.equal(got[1].ack(), true);
  await eventually("one is settled", async () => (await unsettled(topic, "g")) === 2);
  assert.equal(got[0].extend(60_000), true);
  got[2].nack("again", 0);
  await eventually("one comes again", () => got.length === 4);
  assert.equal(got[3].attempt, 2);
  got[0].ack();
  got[3].ack();
  await settled(topic, "g");
});

test("a manual lease that runs out brings the event again", async () => {
  const topic = newTopic();
  const got = [];
  await client.subscribe(topic, "g", (_, delivery) => got.push(delivery), { ack: "manual", ackTimeoutMs: 1_000 });
  await client.publish(topic, 1);
  await eventually("a second attempt", () => got.length === 2);
  assert.equal(got[0].signal.aborted, true);
  assert.equal(got[1].signal.aborted, false);
  got[1].ack();
  await settled(topic, "g");
});

test("no more handlers run at a time than were asked for", async () => {
  const topic = newTopic();
  let running = 0;
  let most = 0;
  let done = 0;
  await client.subscribe(
    topic,
    "g",
    async () => {
      most = Math.max(most, ++running);
      await pause(5);
      running--;
      done++;
    },
    { concurrency: 3 },
  );
  await client.publishMany(topic, Array.from({ length: 60 }, (_, i) => ({ payload: i })));
  await eventually("all", () => done === 60);
  assert.equal(most, 3);
  await settled(topic, "g");
  await assert.rejects(client.subscribe(topic, "none", () => {}, { concurrency: 0 }), { code: "bad_options" });
});

test("acknowledgements leave together", async () => {
  // The frames that leave are counted on their way into the socket.
  const frames = [];
  const { default: WebSocket } = await import("ws");
  class Counting extends WebSocket {
    send(data) {
      frames.push(JSON.parse(data));
      super.send(data);
    }
  }
  const counted = await connect(hub.websocket, { token: hub.token, WebSocket: Counting });
  const topic = newTopic();
  await client.publishMany(topic, Array.from({ length: 1_000 }, (_, i) => ({ payload: i })));
  let got = 0;
  await counted.subscribe(topic, "g", () => void got++, { from: "earliest", maxInFlight: 1_000 });
  await settled(topic, "g");
  await counted.close();
  const acks = frames.filter((f) => f.op === "ACK");
  assert.equal(got, 1_000);
  assert.equal(acks.flatMap((f) => f.ids ?? [f.id]).length, 1_000);
  assert.ok(acks.length < 500, `${acks.length} frames`);
  assert.ok(acks.every((f) => (f.ids?.length ?? 1) <= 1_000));
});

test("a lease lives as long as its handler, and those that wait for one", async () => {
  const topic = newTopic();
  const attempts = [];
  const slow = async (_, delivery) => {
    attempts.push(delivery.attempt);
    await pause(2_500);
  };
  await client.subscribe(topic, "g", slow, { ackTimeoutMs: 1_000, concurrency: 1 });
  await client.publish(topic, 1);
  await client.publish(topic, 2);
  await settled(topic, "g");
  assert.deepEqual(attempts, [1, 1]);
});

test("a lease is not prolonged for ever, and its handler is not run beside itself", async () => {
  const topic = newTopic();
  const attempts = [];
  const stuck = gate();
  await client.subscribe(
    topic,
    "g",
    (_, delivery) => {
      attempts.push(delivery.attempt);
      return stuck.promise;
    },
    { ackTimeoutMs: 1_000, maxLeaseMs: 1, maxAttempts: 0 },
  );
  let elsewhere = 0;
  const other = await connect(hub.websocket, { token: hub.token });
  await client.publish(topic, 1);
  await eventually("the handler runs", () => attempts.length === 1);
  await other.subscribe(topic, "g", (_, delivery) => void (elsewhere = delivery.attempt));
  await eventually("another member gets the event", () => elsewhere > 1);
  assert.deepEqual(attempts, [1]);
  stuck.open();
  await settled(topic, "g");
  await other.close();
});

test("an event that comes again while its handler runs is settled by that handler", async () => {
  const topic = newTopic();
  const cut = await connect(proxy.url, { token: hub.token, ...fast });
  let running = 0;
  let runs = 0;
  const going = gate();
  const subscription = await cut.subscribe(topic, "g", async (_, delivery) => {
    assert.equal(++running, 1);
    runs++;
    await going.promise;
    running--;
    assert.equal(delivery.signal.aborted, true);
  });
  await client.publish(topic, 1);
  await eventually("the handler runs", () => runs === 1);
  for (let i = 0; i < 3; i++) {
    await cutOnce(proxy, cut);
  }
  await eventually("the event is here again", async () => (await unsettled(topic, "g")) === 1);
  going.open();
  await settled(topic, "g");
  assert.equal(runs, 1);
  assert.equal(subscription.active, 0);
  await cut.close();
});

test("an acknowledgement that is lost with its connection costs no second run", async () => {
  const topic = newTopic();
  const cut = await connect(proxy.url, { token: hub.token, ...fast });
  const runs = [];
  await cut.subscribe(topic, "g", (event) => {
    runs.push(event.payload);
    proxy.cut(); // before the acknowledgement is written
  });
  await client.publish(topic, 1);
  await settled(topic, "g");
  assert.deepEqual(runs, [1]);
  await cut.close();
});

test("for await gives one event after the other", async () => {
  const topic = newTopic();
  await client.publishMany(topic, Array.from({ length: 50 }, (_, i) => ({ payload: i })));
  const got = [];
  for await (const delivery of client.events(topic, "g", { from: "earliest" })) {
    got.push(delivery.event.payload);
    if (got.length === 50) break; // leaves the group, and gives this event back
  }
  assert.deepEqual(got, Array.from({ length: 50 }, (_, i) => i));
  for await (const delivery of client.events(topic, "g")) {
    assert.equal(delivery.event.payload, 49);
    assert.equal(delivery.attempt, 2);
    delivery.ack();
    break;
  }
  await settled(topic, "g");
});

test("a signal ends a subscription, and a loop over events", async () => {
  const topic = newTopic();
  const abort = new AbortController();
  const subscription = await client.subscribe(topic, "g", () => {}, { signal: abort.signal });
  const got = [];
  const loop = (async () => {
    for await (const { event } of client.events(topic, "loop", { signal: abort.signal })) got.push(event.payload);
  })();
  await client.publish(topic, 0); // the OK of the loop's SUBSCRIBE comes before
  await eventually("an event", () => got.length === 1);
  abort.abort();
  await loop;
  assert.equal(await subscription.closed, undefined);
  await client.subscribe(topic, "g", () => {}); // the name is free
  await assert.rejects(client.subscribe(topic, "late", () => {}, { signal: abort.signal }), { code: "aborted" });
});

test("a group is joined once", async () => {
  const topic = newTopic();
  const subscription = await client.subscribe(topic, "g", () => {});
  await assert.rejects(client.subscribe(topic, "g", () => {}), { code: "already_subscribed" });
  await subscription.unsubscribe();
  await subscription.unsubscribe();
  const [again] = await Promise.all([client.subscribe(topic, "g", () => {}), client.subscribe(topic, "g2", () => {})]);
  await again.drain();
  await assert.rejects(client.subscribe(topic, "", () => {}), { code: "bad_group" });
  await assert.rejects(client.subscribe(topic, "x", () => {}, { from: "ts" }), EventHubError);
});

test("pause stops deliveries, also over a reconnect, and resume starts them", async () => {
  const topic = newTopic();
  const cut = await connect(proxy.url, { token: hub.token, ...fast });
  const got = [];
  const subscription = await cut.subscribe(topic, "g", (event) => void got.push(event.payload));
  await subscription.pause();
  await client.publish(topic, 1);
  await cutOnce(proxy, cut);
  await client.publish(topic, 2);
  await cut.publish(newTopic(), "an answer that comes after events, if there were any");
  assert.deepEqual(got, []);
  await subscription.resume();
  await settled(topic, "g");
  assert.deepEqual(got.sort(), [1, 2]);
  await cut.close();
});

test("unsubscribe gives back what is not done; drain finishes it", async () => {
  const topic = newTopic();
  const going = gate();
  let runs = 0;
  const leaving = await client.subscribe(topic, "leaves", () => (runs++, going.promise));
  const draining = await client.subscribe(topic, "drains", () => (runs++, going.promise));
  await client.publish(topic, 1);
  await eventually("both run", () => runs === 2);
  await leaving.unsubscribe();
  const drained = draining.drain();
  await client.publish(topic, 2);
  going.open();
  await drained;
  assert.equal(await unsettled(topic, "leaves"), 2);
  await eventually("the first is settled, and the second was not taken", async () => (await unsettled(topic, "drains")) === 1);
  assert.equal(runs, 2);
});

test("close lets handlers finish", async () => {
  const topic = newTopic();
  const closing = await connect(hub.websocket, { token: hub.token });
  let begun = 0;
  let done = 0;
  const handler = async () => {
    begun++;
    await pause(50);
    done++;
  };
  await closing.subscribe(topic, "g", handler, { concurrency: 4 });
  await client.publishMany(topic, Array.from({ length: 40 }, (_, i) => ({ payload: i })));
  await eventually("some run", () => begun > 0);
  await closing.close();
  assert.equal(done, begun);
  assert.equal(await unsettled(topic, "g"), 40 - done);
});

test("a subscription that the hub ends says so", async () => {
  const topic = newTopic();
  const errors = [];
  const off = client.on("error", (error) => errors.push(error.code));
  const subscription = await client.subscribe(topic, "g", () => {});
  const answer = await fetch(`${hub.ops}/groups/${topic}/g`, { method: "DELETE", headers: { Authorization: `Bearer ${hub.token}` } });
  assert.equal(answer.status, 204);
  assert.equal((await subscription.closed).code, "not_subscribed");
  assert.deepEqual(errors, ["not_subscribed"]);
  off();
});

test("one subscription reads several topics", async () => {
  const [topic, second] = [newTopic(), newTopic()];
  const got = [];
  await client.subscribe(topic, "g", (event) => void got.push([event.topic, event.payload]), { topics: [second] });
  await client.publish(topic, 1, { id: "same" });
  await client.publish(second, 2, { id: "same" });
  await eventually("both", () => got.length === 2);
  await settled(topic, "g");
  await settled(second, "g");
});
