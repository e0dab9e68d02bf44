// Kills the hub and cuts connections at random while events flow both ways.
//
// CHAOS_EVENTS (2,000), CHAOS_CUTS (20) and CHAOS_KILLS (1) say how much; `npm run chaos` with
// 100000, 1000 and 50 is the long form. CHAOS_SEED repeats the same order of faults.
import assert from "node:assert/strict";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { connect, replay } from "eventhub-client";
import { DurableHub, eventually, newTopic } from "./hub.mjs";
import { startProxy } from "./proxy.mjs";

const number = (name, otherwise) => Number(process.env[name] ?? otherwise);
const events = number("CHAOS_EVENTS", 2_000);
const cuts = number("CHAOS_CUTS", 20);
const kills = number("CHAOS_KILLS", 1);
const seed = number("CHAOS_SEED", Date.now() % 1_000_000);
const patience = 60_000 + cuts * 1_000 + kills * 10_000;

/** Numbers from 0 to 1 that a seed repeats (mulberry32). */
function random(state) {
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

const maxInFlight = 50;

test(`${events} events, ${cuts} cuts and ${kills} kills, seed ${seed}`, { timeout: 2 * patience }, async (t) => {
  const dir = mkdtempSync(join(tmpdir(), "eventhub-chaos-"));
  const hub = new DurableHub(dir);
  t.after(async () => {
    await hub.stop();
    rmSync(dir, { recursive: true });
  });
  await hub.start();
  const proxies = [await startProxy(hub.websocket), await startProxy(hub.websocket)];
  t.after(() => Promise.all(proxies.map((proxy) => proxy.stop())));
  const options = { token: hub.token, minPauseMs: 10, maxPauseMs: 100, attemptTimeoutMs: 5_000 };
  const [publisher, consumer] = await Promise.all(proxies.map((proxy) => connect(proxy.url, options)));
  t.after(() => Promise.all([publisher, consumer].map((client) => client.close({ timeoutMs: 0 }))));
  const topic = newTopic();

  // Consume: how often each event was handled, and whether a handler ever ran beside itself.
  const runs = new Map();
  const running = new Set();
  let beside = 0;
  const lately = []; // when handlers ended, most recent last
  let inFlight = 0; // at the breaks: so many may come twice
  let breaks = 0;
  const rnd = random(seed);
  const subscription = await consumer.subscribe(
    topic,
    "g",
    async ({ id }) => {
      if (running.has(id)) beside++;
      running.add(id);
      await new Promise((resolve) => (rnd() < 0.02 ? setTimeout(resolve, 1 + rnd() * 20) : setImmediate(resolve)));
      running.delete(id);
      runs.set(id, (runs.get(id) ?? 0) + 1);
      lately.push(performance.now());
    },
    { maxAttempts: 0, maxInFlight },
  );
  consumer.on("state", (state) => {
    if (state !== "waiting") return;
    breaks++;
    inFlight += maxInFlight;
  });

  // Publish: which events were answered, and which may or may not be stored.
  const answered = new Map();
  const unknown = new Set();
  let next = 0;
  const lane = async () => {
    while (next < events) {
      const n = next++;
      for (;;) {
        try {
          answered.set(n, await publisher.publish(topic, n));
          break;
        } catch (error) {
          if (error.code === "outcome_unknown") {
            unknown.add(n);
            break;
          }
          if (!error.retryable) throw error;
        }
      }
      // Spreads the events over the faults.
      await new Promise((resolve) => setTimeout(resolve, rnd() * 4));
    }
  };
  const published = Promise.all(Array.from({ length: 64 }, lane));

  // Break: each fault comes when its share of the events has been published.
  const faults = [...Array(cuts).fill("cut"), ...Array(kills).fill("kill")].map((kind) => ({ kind, at: rnd() * events })).sort((a, b) => a.at - b.at);
  let went = { cut: 0, kill: 0 };
  for (const { kind, at } of faults) {
    await eventually(`${at} events were published`, () => answered.size + unknown.size >= Math.min(at, events - 64), patience);
    went[kind]++;
    if (kind === "cut") proxies[went.cut % 2].cut();
    else {
      // A killed hub may also deliver again what was acknowledged in its last moments.
      const since = performance.now() - 500;
      inFlight += lately.length - lately.findLastIndex((at) => at < since) - 1;
      await hub.kill();
      await hub.start();
    }
  }
  await published;

  const stored = new Map();
  for await (const { id, payload } of replay({ http: hub.http, token: hub.token }, topic)) {
    assert.equal(stored.has(payload), false, `event ${payload} is stored twice`);
    stored.set(payload, id);
  }
  for (const [n, id] of answered) assert.equal(stored.get(n), id, `event ${n} was answered, and is not stored`);
  for (const n of stored.keys()) assert.ok(answered.has(n) || unknown.has(n), `event ${n}`);
  await eventually("every stored event was handled", () => runs.size >= stored.size, patience);
  await subscription.drain();
  for (const id of stored.values()) assert.ok(runs.has(id), `event ${id} was not handled`);
  const twice = [...runs.values()].reduce((sum, n) => sum + n - 1, 0);
  t.diagnostic(`stored ${stored.size}, answered ${answered.size}, unknown ${unknown.size}; handled again ${twice} of at most ${inFlight}; ${breaks} breaks`);
  assert.equal(beside, 0, "a handler ran beside itself");
  assert.ok(twice <= inFlight, `${twice} events were handled again; ${inFlight} were in flight at ${breaks} breaks`);
});
