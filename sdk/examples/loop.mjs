// Reads a topic in a loop, and publishes many events at once.
import { connect } from "eventhub-client";

const hub = await connect(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", { token: process.env.EVENTHUB_TOKEN });
const numbers = Array.from({ length: 1000 }, (_, i) => ({ payload: i + 1 }));
await hub.publishMany("numbers", numbers);

let sum = 0;
for await (const { event } of hub.events("numbers", "adder", { from: "earliest" })) {
  sum += event.payload;
  if (event.payload === 1000) break;
}
console.log(sum);
await hub.close();
// Prints: 500500
