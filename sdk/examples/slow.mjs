// Runs two slow handlers at a time. Their leases of a second are prolonged while they run, and
// while events wait for their turn, so that each event is handled once.
import { connect } from "eventhub-client";

const hub = await connect(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", { token: process.env.EVENTHUB_TOKEN });
let running = 0;
let most = 0;
let handled = 0;
let all;
const done = new Promise((resolve) => (all = resolve));
const render = async () => {
  most = Math.max(most, ++running);
  await new Promise((resolve) => setTimeout(resolve, 1_300));
  running--;
  if (++handled === 4) all();
};
await hub.subscribe("videos.uploaded", "renderer", render, { concurrency: 2, ackTimeoutMs: 1_000, maxLeaseMs: 60_000 });
await hub.publishMany("videos.uploaded", [1, 2, 3, 4].map((video) => ({ payload: { video } })));
await done;
await hub.close();
console.log(`${handled} were handled, ${most} at a time`);
// Prints: 4 were handled, 2 at a time
