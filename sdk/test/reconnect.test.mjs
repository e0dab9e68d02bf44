import assert from "node:assert/strict";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { connect } from "eventhub-client";
import { DurableHub, eventually, newTopic, startHub } from "./hub.mjs";
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

test("a member of a group stays one over cuts, and misses nothing", async () => {
  const client = await connect(proxy.url, { token: hub.token, ...fast });
  const topic = newTopic();
  const got = new Set();
  await client.subscribe(topic, "g", (event) => void got.add(event.payload));
  for (let i = 0; i < 5; i++) {
    const publishes = client.publishMany(topic, Array.from({ length: 100 }, (_, n) => ({ payload: i * 100 + n })), { inFlight: 20 });
    await cutOnce(proxy, client);
    await publishes;
  }
  await eventually("all", () => got.size === 500);
  await client.close();
});

test("a hub that is killed and comes back loses nothing that it answered", async (t) => {
  const dir = mkdtempSync(join(tmpdir(), "eventhub-sdk-"));
  const durable = new DurableHub(dir);
  t.after(async () => {
    await durable.stop();
    rmSync(dir, { recursive: true });
  });
  await durable.start();
  const client = await connect(durable.websocket, { token: durable.token, ...fast });
  const topic = newTopic();
  const got = new Set();
  await client.subscribe(topic, "g", (event) => void got.add(event.id));
  const ids = await client.publishMany(topic, Array.from({ length: 100 }, (_, i) => ({ payload: i })));
  await durable.kill();
  const later = client.publish(topic, "while there is no hub");
  await durable.start();
  ids.push(await later);
  await eventually("all", () => ids.every((id) => got.has(id)));
  await client.close();
});

test("a token is replaced before it expires, and subscriptions go on", async () => {
  const tokens = [];
  const token = () => {
    tokens.push(jwt(["publish:**", "subscribe:**"], 2, { jti: String(tokens.length) }));
    return tokens.at(-1);
  };
  const client = await connect(hub.websocket, { token, ...fast });
  const states = [];
  client.on("state", (state) => states.push(state));
  const topic = newTopic();
  const got = [];
  await client.subscribe(topic, "g", (event) => void got.push(event.payload));
  await eventually("three tokens", () => tokens.length >= 3);
  await client.publish(topic, "still here");
  await eventually("the event", () => got.length === 1);
  assert.deepEqual(states, []); // the connection stayed
  await client.close();
});

test("a token provider that never answers is asked again", async () => {
  let asked = 0;
  const never = new Promise(() => {});
  // The first question and the third, which is that of a refresh, have no answer.
  const token = () => (++asked % 2 === 1 ? never : jwt(["publish:**"], 2));
  const client = await connect(proxy.url, { token, tokenTimeoutMs: 200, connectTimeoutMs: 10_000, ...fast });
  assert.equal(asked, 2);
  await eventually("the question of a refresh", () => asked >= 3);
  await cutOnce(proxy, client);
  await client.ready(AbortSignal.timeout(10_000));
  assert.ok(asked >= 4);
  await client.close();
});

test("a token that expires without a better one ends the connection, and the next token opens another", async () => {
  let give = jwt(["publish:**"], 1, { jti: "short" });
  const client = await connect(hub.websocket, { token: () => give, ...fast, minPauseMs: 200, maxPauseMs: 200 });
  await eventually("the connection has ended", () => client.state === "waiting");
  give = jwt(["publish:**"]);
  await client.publish(newTopic(), 1);
  await client.close();
});

test("a token that does not allow a subscription any more ends only that", async () => {
  const [kept, lost] = [newTopic(), newTopic()];
  let all = true;
  const token = () => jwt(all ? [`subscribe:${kept}`, `subscribe:${lost}`] : [`subscribe:${kept}`], 2, { jti: String(all) });
  const client = await connect(hub.websocket, { token, ...fast });
  const staying = await client.subscribe(kept, "g", () => {});
  const ending = await client.subscribe(lost, "g", () => {});
  all = false;
  assert.equal((await ending.closed).code, "forbidden");
  assert.equal(await Promise.race([staying.closed, "open"]), "open");
  await client.close();
});

test("a wrong token rejects connect, and no process ends", async () => {
  await assert.rejects(connect(hub.websocket, { token: "wrong" }), { code: "bad_token", retryable: false });
  await assert.rejects(connect(hub.websocket, {}), { code: "no_token" });
});

test("connect gives up after its time, or when it is told to", async () => {
  const closed = "ws://127.0.0.1:1";
  await assert.rejects(connect(closed, { token: "t", connectTimeoutMs: 50, ...fast }), { code: "connect_timeout", retryable: true });
  await assert.rejects(connect(closed, { token: "t", signal: AbortSignal.timeout(30), ...fast }), { code: "aborted" });
  await assert.rejects(connect(closed, { token: "t", signal: AbortSignal.abort() }), { code: "aborted" });
});

test("a connection that is dead without having ended is replaced", async () => {
  const client = await connect(proxy.url, { token: hub.token, pingMs: 100, ...fast });
  const lost = new Promise((resolve) => client.on("state", (state, error) => state === "waiting" && resolve(error)));
  proxy.deafen(true);
  assert.match((await lost).message, /does not answer/);
  proxy.deafen(false);
  await client.publish(newTopic(), 1);
  await client.close();
});

test("many clients whose hub was away do not come back at once", async () => {
  const clients = await Promise.all(Array.from({ length: 20 }, () => connect(proxy.url, { token: hub.token, minPauseMs: 200, maxPauseMs: 200 })));
  const times = [];
  for (const client of clients) client.on("state", (state) => state === "token" && times.push(performance.now()));
  proxy.cut();
  await Promise.all(clients.map(async (client) => (await eventually("noticed", () => client.state !== "ready"), client.ready())));
  assert.ok(Math.max(...times) - Math.min(...times) > 20, "all came within 20 ms");
  await Promise.all(clients.map((client) => client.close()));
});
