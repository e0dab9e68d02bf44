import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { createClient, step, table } from "eventhub-client";
import { rig, Socket } from "./rig.mjs";

const states = ["idle", "token", "opening", "authenticating", "ready", "waiting", "failed", "closed"];
const inputs = ["start", "token", "open", "accepted", "lost", "refused", "wake", "close"];

test("README shows the table of the state machine", () => {
  const readme = readFileSync(new URL("../README.md", import.meta.url), "utf8");
  const rows = [...readme.matchAll(/^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| (.*?) \|$/gm)].map(([, state, input, next, actions]) => [state, input, next, actions]);
  const expected = states.flatMap((state) =>
    inputs.flatMap((input) => {
      const [next, ...actions] = table[state][input] ?? [];
      return next ? [[state, input, next, actions.join(", ")]] : [];
    }),
  );
  assert.deepEqual(rows, expected);
  assert.deepEqual(Object.keys(table), states);
});

test("an input that a state does not list changes nothing", () => {
  assert.equal(step("closed", "start"), undefined);
  assert.equal(step("waiting", "lost"), undefined);
  assert.equal(step("ready", "token"), undefined);
});

// -- each transition, on a socket that the test moves

test("the way to a connection", async () => {
  const { client, states, to, last } = rig();
  await to.ready();
  await client.ready();
  assert.deepEqual(states, ["opening", "authenticating", "ready"]);
  assert.deepEqual(last().sent, [{ op: "AUTH", token: "a token", caps: ["group_reset", "events_lost", "retry_after"], corr: "auth" }]);
  await client.close();
  assert.equal(client.state, "closed");
  assert.equal(last().closed, true);
});

for (const [from, breaks] of [
  ["token", ({ asked }) => asked.at(-1).reject(new Error("no"))],
  ["opening", ({ last }) => last().breaks()],
  ["authenticating", ({ last }) => last().breaks()],
  ["ready", ({ last }) => last().breaks()],
]) {
  test(`lost in ${from}: another attempt, with a token of its own`, async () => {
    const r = rig({ minPauseMs: 20, maxPauseMs: 20 });
    await r.to[from]();
    await r.turn();
    breaks(r);
    await r.until("waiting");
    const before = r.asked.length;
    await r.to.ready();
    assert.equal(r.asked.length, before + 1);
    await r.client.close();
  });

  test(`close in ${from}: nothing is left`, async () => {
    const r = rig();
    const waiting = r.client.ready().catch((error) => error.code);
    await r.to[from]();
    await r.client.close({ timeoutMs: 0 });
    assert.equal(r.client.state, "closed");
    if (from !== "ready") assert.equal(await waiting, "closed");
    assert.ok(Socket.all.every((socket) => socket.closed));
    r.asked.at(-1)?.resolve("too late");
    await r.turn();
    assert.equal(r.client.state, "closed");
  });
}

for (const from of ["opening", "authenticating", "ready"]) {
  test(`a close code of 4100 to 4199 in ${from}: the client gives up`, async () => {
    const r = rig();
    const errors = [];
    r.client.on("error", (error) => errors.push(error.code));
    await r.to[from]();
    const publish = r.client.publish("t", 1).catch((error) => error.code);
    r.last().breaks(4103, "auth_refused");
    assert.equal(r.client.state, "failed");
    assert.equal(await publish, from === "ready" ? "outcome_unknown" : "gave_up");
    await assert.rejects(r.client.ready(), { code: "gave_up", retryable: false });
    assert.deepEqual(errors, ["gave_up"]);
    await r.client.close();
  });
}

test("close while it waits, and while it is closed", async () => {
  const r = rig({ minPauseMs: 60_000, maxPauseMs: 60_000 });
  await r.to.waiting();
  assert.equal(r.client.state, "waiting");
  await r.client.close();
  await r.client.close();
  assert.deepEqual(r.states.slice(-2), ["waiting: connection_lost", "closed: closed"]);
});

test("a hub that ends is left alone for as long as it asks, once", async () => {
  const r = rig();
  await r.to.ready();
  const begin = performance.now();
  r.last().breaks(4000, "draining retry_after_ms=300");
  await r.to.opening();
  assert.ok(performance.now() - begin >= 299);
  r.last().breaks(1006, "connect ECONNREFUSED 127.0.0.1:99999");
  const again = performance.now();
  await r.to.ready();
  assert.ok(performance.now() - again < 30_000);
  r.last().breaks(4000, "draining retry_after_ms=999999");
  await r.to.ready();
  assert.ok(performance.now() - again < 30_000);
  await r.client.close();
});

test("a token that is refused: the provider is asked again, three times at most", async () => {
  const r = rig();
  for (let i = 1; i <= 3; i++) {
    await r.to.authenticating();
    r.last().says({ op: "ERR", code: "jwt_invalid", msg: "no", corr: "auth" });
  }
  assert.equal(r.client.state, "failed");
  assert.equal(r.asked.length, 3);
  await assert.rejects(r.client.ready(), { code: "jwt_invalid" });
});

test("a fixed token that is refused is not tried again", async () => {
  const r = rig({ token: "fixed" });
  await r.until("opening");
  r.last().opens();
  r.last().says({ op: "ERR", code: "bad_token", msg: "no", corr: "auth" });
  assert.equal(r.client.state, "failed");
});

test("a hub at its limits is asked again, whatever the token", async () => {
  const r = rig({ token: "fixed" });
  await r.until("opening");
  r.last().opens();
  r.last().says({ op: "ERR", code: "overloaded", msg: "later", corr: "auth" });
  assert.equal(r.client.state, "waiting");
  await r.client.close();
});

test("news of an earlier socket or token changes nothing", async () => {
  const r = rig();
  await r.to.waiting();
  const [old] = Socket.all;
  await r.until("token");
  await r.turn();
  old.opens(); // as Firefox does, which delays attempts
  old.says({ op: "OK", corr: "auth" });
  old.breaks(4103);
  assert.equal(r.client.state, "token");
  await r.to.ready();
  assert.equal(Socket.all.length, 2);
  assert.equal(old.closed, true);
  await r.client.close();
});

test("a subscription made while the token is fetched is sent once", async () => {
  const r = rig();
  await r.to.token();
  const joined = r.client.subscribe("t", "g", () => {});
  await r.to.ready();
  const frames = () => r.last().sent.filter((f) => f.op === "SUBSCRIBE");
  assert.equal(frames().length, 1);
  r.last().says({ op: "OK", corr: frames()[0].corr });
  const subscription = await joined;

  // One that is left while there is no connection is not made again.
  r.last().breaks();
  await subscription.unsubscribe();
  await r.to.ready();
  assert.equal(frames().length, 0);
  await r.client.close();
});

/** A JWT that expires in some milliseconds; nobody checks its signature here. */
const expiring = (ms, name) => `${name}.${btoa(JSON.stringify({ exp: (Date.now() + ms) / 1000 }))}.x`;

test("a token is replaced before it expires; one that comes after a break is not used for the new connection", async () => {
  const r = rig();
  await r.to.token();
  await r.turn();
  r.asked[0].resolve(expiring(250, "first"));
  await r.until("opening");
  r.last().opens();
  r.last().says({ op: "OK", corr: "auth" });
  while (r.asked.length < 2) await r.turn(); // the refresh asks
  const first = r.last();
  first.breaks();
  await r.until("token"); // the reconnect waits for the answer to the same question
  await r.turn();
  assert.equal(r.asked.length, 2);
  r.asked[1].resolve(expiring(60_000, "second"));
  await r.until("opening");
  r.last().opens();
  assert.equal(first.sent.filter((f) => f.op === "AUTH").length, 1);
  assert.deepEqual(r.last().sent.map((f) => f.token.split(".")[0]), ["second"]);
  await r.client.close();
});

test("frames behind a new token that is refused are sent again on the next connection", async () => {
  const r = rig();
  await r.to.token();
  await r.turn();
  r.asked[0].resolve(expiring(200, "first"));
  await r.until("opening");
  r.last().opens();
  r.last().says({ op: "OK", corr: "auth" });
  while (r.asked.length < 2) await r.turn();
  r.asked[1].resolve(expiring(60_000, "second"));
  while (r.last().sent.length < 2) await r.turn();
  const publish = r.client.publish("t", 1);
  const { corr } = r.last().sent.at(-1);
  r.last().says({ op: "ERR", code: "jwt_invalid", msg: "revoked", corr: "auth" });
  await r.to.ready();
  const again = r.last().sent.find((f) => f.op === "PUBLISH");
  assert.equal(again.corr, corr);
  r.last().says({ op: "OK", corr, id: "stored" });
  assert.equal(await publish, "stored");
  await r.client.close();
});

test("a connection on which nothing comes is given up", async () => {
  const r = rig({ pingMs: 20 });
  await r.to.ready();
  const socket = r.last();
  await r.until("waiting");
  assert.equal(socket.sent.at(-1).corr, "ping");
  assert.ok(r.states.includes("waiting: connection_lost"));
  await r.client.close();
});

test("an attempt that hangs is given up", async () => {
  const r = rig({ attemptTimeoutMs: 10 });
  await r.to.opening();
  await r.until("waiting");
  assert.ok(r.states.includes("waiting: connect_timeout"));
  assert.equal(Socket.all[0].closed, true);
  await r.client.close();
});

test("an address that the platform refuses is not tried again", async () => {
  class Refusing {
    constructor() {
      throw new SyntaxError("not an address");
    }
  }
  const client = createClient("nonsense", { WebSocket: Refusing });
  await assert.rejects(client.ready(), { code: "gave_up" });
});
