// Ends a loop, a subscription and a publish with an AbortSignal.
import { connect, createClient } from "eventhub-client";

const hub = await connect(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", { token: process.env.EVENTHUB_TOKEN });
const stop = new AbortController();
const subscription = await hub.subscribe("news", "archive", () => {}, { signal: stop.signal });
await hub.publish("news", "one");
for await (const { event } of hub.events("news", "reader", { from: "earliest", signal: stop.signal })) {
  console.log(event.payload);
  stop.abort();
}
console.log(`the loop is over, and so is the subscription: ${(await subscription.closed) === undefined}`);
await hub.close();

// A publish that has not been sent is taken back.
const offline = createClient("ws://127.0.0.1:1");
await offline.publish("news", "never", { signal: AbortSignal.timeout(50) }).catch((error) => console.log(error.code));
await offline.close();
// Prints: one
// Prints: the loop is over, and so is the subscription: true
// Prints: aborted
