// Pauses a member, lets it go on, and leaves when its handlers have finished.
import { connect } from "eventhub-client";

const hub = await connect(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", { token: process.env.EVENTHUB_TOKEN });
let finished = 0;
const handle = async () => {
  await new Promise((resolve) => setTimeout(resolve, 20));
  finished++;
};
const subscription = await hub.subscribe("jobs", "worker", handle, { concurrency: 4 });
await subscription.pause();
await hub.publishMany("jobs", Array.from({ length: 8 }, (_, job) => ({ payload: job })));
console.log(`paused: ${finished} finished`);

await subscription.resume();
while (finished === 0) await new Promise((resolve) => setTimeout(resolve, 5));
await subscription.drain(); // takes no more, and waits for the handlers that run
const before = finished;
console.log(`drained: nothing runs (${subscription.active}), some have finished (${finished >= 1})`);

// The rest goes to the next member. close() drains all subscriptions, and waits for publishes.
await hub.subscribe("jobs", "worker", handle, { concurrency: 4 });
while (finished < 8) await new Promise((resolve) => setTimeout(resolve, 5));
const late = hub.publish("jobs.done", { before });
await hub.close();
console.log(`closed: ${finished} finished, and the last event is stored: ${typeof (await late) === "string"}`);
// Prints: paused: 0 finished
// Prints: drained: nothing runs (0), some have finished (true)
// Prints: closed: 8 finished, and the last event is stored: true
