// Races that clients of other buses had: tokens that come, are replaced, or are refused beside
// subscriptions and publishes. The hub, its sockets and the tokens are real.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import WebSocket from "ws";
import { connect, createClient } from "eventhub-client";
import { eventually, newTopic, startHub } from "./hub.mjs";
import { jwt, secret } from "./jwt.mjs";
import { cutOnce, startProxy } from "./proxy.mjs";

let hub, proxy;
before(async () => {
  hub = await startHub([], { JWT_SECRET: secret, WS_TOKEN: "the hub's own token" });
  proxy = await startProxy(hub.websocket);
});
after(async () => {
  await proxy.stop();
  await hub.stop();
});

const fast = { minPauseMs: 5, maxPauseMs: 50 };
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** A WebSocket that tells of each frame before and after it is sent. */
function watched({ before: first = () => {}, after: then = () => {} } = {}) {
  const frames = [];
  class Watched extends WebSocket {
    send(data) {
      const frame = JSON.parse(data);
      frames.push(frame);
      first(frame);
      super.send(data);
      then(frame);
    }
  }
  return { Watched, frames, sent: (op) => frames.filter((frame) => frame.op === op) };
}

/** Tokens that live for some seconds, and how they were asked for. Each test has its own quotas. */
function tokens(seconds) {
  const t = { asked: 0, open: 0, most: 0 };
  const sub = newTopic();
  t.provider = async () => {
    const n = t.asked++;
    t.most = Math.max(t.most, ++t.open);
    await pause(20); // as a request takes time
    t.open--;
    return jwt(["*:**"], seconds, { sub, jti: `${sub} ${n}` });
  };
  return t;
}

test("a subscription that is made while the token provider runs is made once", async () => {
  const { Watched, sent } = watched();
  const topic = newTopic();
  const got = [];
  let subscribed;
  const client = createClient(hub.websocket, {
    WebSocket: Watched,
    token: async () => {
      subscribed ??= client.subscribe(topic, "g", (event) => void got.push(event.payload));
      await pause(10);
      return hub.token;
    },
  });
  await client.ready();
  const subscription = await subscribed;
  await client.publish(topic, 1);
  await eventually("the event", () => got.length === 1);
  assert.equal(sent("SUBSCRIBE").length, 1);
  assert.equal(await Promise.race([subscription.closed, "open"]), "open");
  await client.close();
});

test("subscriptions at every moment of connecting are made once each, with one token", async () => {
  const t = tokens(3600);
  const topics = Array.from({ length: 100 }, newTopic);
  const got = new Set();
  const waiting = [];
  let next = 0;
  const some = (n) => {
    for (const topic of topics.slice(next, (next += n))) waiting.push(client.subscribe(topic, "g", () => void got.add(topic)));
  };
  // Beside the frames of connecting, too: before and after AUTH, and between the first SUBSCRIBEs.
  const { Watched, sent } = watched({ before: ({ op }) => op === "AUTH" && some(20), after: ({ op }) => (op === "AUTH" || op === "SUBSCRIBE") && some(1) });
  const client = createClient(hub.websocket, { token: t.provider, WebSocket: Watched });
  some(20);
  const states = client.on("state", () => some(5));
  await client.ready();
  states();
  some(topics.length);
  await Promise.all(waiting);
  assert.deepEqual(sent("SUBSCRIBE").map(({ topic }) => topic).sort(), [...topics].sort());
  assert.equal(t.asked, 1);
  await Promise.all(topics.map((topic) => client.publish(topic, 1)));
  await eventually("an event each", () => got.size === topics.length);
  await client.close();
});

test("tokens are replaced on a busy connection: nothing is lost, refused, or delivered twice", async () => {
  const t = tokens(2);
  const { Watched, sent } = watched();
  const client = await connect(hub.websocket, { token: t.provider, WebSocket: Watched });
  const states = [];
  client.on("state", (state) => states.push(state));
  const errors = [];
  client.on("error", ({ code }) => errors.push(code));
  const topic = newTopic();
  const got = [];
  await client.subscribe(topic, "g", async (event, { attempt }) => {
    await pause(1);
    got.push([event.payload, attempt]);
  });
  // Joins and leaves a group all the time, as tokens change.
  let joined = 0;
  const churn = (async () => {
    while (t.asked < 4) {
      const subscription = await client.subscribe(topic, "churn", () => {});
      joined++;
      await subscription.unsubscribe();
      await pause(20);
    }
  })();
  let published = 0;
  while (t.asked < 4) {
    await client.publishMany(topic, Array.from({ length: 20 }, () => ({ payload: published++ })));
    await pause(5); // at most 8,000 frames a second with the ACKs: the hub refuses more than 10,000
  }
  await churn;
  await eventually("all events", () => got.length >= published);
  assert.deepEqual(got.sort(([a], [b]) => a - b), Array.from({ length: published }, (_, i) => [i, 1]));
  assert.deepEqual([states, errors], [[], []]);
  assert.ok(joined > 0);
  assert.equal(t.most, 1);
  assert.ok(sent("AUTH").length >= 3);
  await client.close();
});

test("after cuts, there is one refresh at a time, and not one for each connection that was", async () => {
  const t = tokens(3);
  const began = performance.now();
  const { Watched, sent } = watched();
  const client = await connect(proxy.url, { token: t.provider, WebSocket: Watched, ...fast });
  for (let i = 0; i < 5; i++) await cutOnce(proxy, client);
  await eventually("two refreshes", () => t.asked >= 8);
  // A connection asks after four fifths of two to three seconds. Six chains would ask six times as
  // often.
  const due = 6 + Math.floor((performance.now() - began) / 1_500) + 1;
  assert.ok(t.asked <= due, `${t.asked} tokens, ${due} were due`);
  assert.equal(new Set(sent("AUTH").map(({ token }) => token)).size, sent("AUTH").length);
  assert.equal(t.most, 1);
  await client.close();
});

test("frames behind a new token that the hub refuses take effect on the next connection", async () => {
  let made = 0;
  const token = () => (made++ === 1 ? "not.a.token" : jwt(["*:**"], 3, { sub: "refused", jti: `refused ${made}` }));
  const topic = newTopic();
  const behind = {};
  const got = [];
  let kept, left, held;
  let refused = false;
  const { Watched } = watched({
    after: ({ op, token }) => {
      if (op !== "AUTH" || token !== "not.a.token") return;
      // The refused token is on its way: the hub reads all of these behind it.
      refused = true;
      behind.published = client.publish(topic, "behind");
      behind.subscribed = client.subscribe(topic, "new", (event) => void got.push(event.payload));
      behind.paused = kept.pause();
      behind.left = left.unsubscribe();
      behind.acked = held.ack();
    },
  });
  const client = await connect(hub.websocket, { token, WebSocket: Watched, ...fast });
  const states = [];
  client.on("state", (state, error) => states.push(error ? `${state} ${error.code}` : state));
  const ofKept = [];
  kept = await client.subscribe(topic, "kept", (event) => void ofKept.push(event.payload));
  left = await client.subscribe(topic, "left", () => {});
  const attempts = [];
  const manual = (event, delivery) => {
    attempts.push([event.payload, delivery.attempt]);
    if (held) delivery.ack();
    else held = delivery;
  };
  await client.subscribe(topic, "manual", manual, { ack: "manual" });
  await client.publish(topic, "first");
  await eventually("the first event everywhere", () => held && ofKept.length === 1);
  await eventually("the refused token", () => refused);
  await Promise.all([behind.published, behind.subscribed, behind.paused, behind.left]);
  assert.equal(behind.acked, true);
  assert.equal(states[0], "waiting jwt_invalid");
  // The group that was joined behind the refusal gets what comes from now on; the one that was
  // paused gets nothing, and the one that was left has no member.
  await client.publish(topic, "last");
  await eventually("the last event", () => got.includes("last") && attempts.some(([payload]) => payload === "last"));
  const group = async (name) => (await fetch(`${hub.ops}/groups/${topic}/${name}`, { headers: { Authorization: `Bearer ${hub.token}` } })).json();
  await eventually("the acknowledgements", async () => {
    const { pending, inflight } = await group("manual");
    return pending + inflight === 0;
  });
  assert.deepEqual(attempts, [["first", 1], ["behind", 1], ["last", 1]]); // its acknowledgement was repeated
  assert.deepEqual(ofKept, ["first"]);
  assert.equal((await group("left")).pending, 2);
  await client.close();
});

test("a connect that times out leaves no connection behind", async () => {
  proxy.deafen(true);
  const attempts = Array.from({ length: 5 }, () => connect(proxy.url, { token: hub.token, connectTimeoutMs: 200, ...fast }));
  for (const attempt of attempts) await assert.rejects(attempt, { code: "connect_timeout", retryable: true });
  await eventually("no connection is left", () => proxy.connections === 0);
  proxy.deafen(false);
});
