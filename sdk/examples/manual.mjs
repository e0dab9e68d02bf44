// Settles events by hand: the first attempt is refused, and comes again after half a second.
import { connect } from "eventhub-client";

const hub = await connect(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", { token: process.env.EVENTHUB_TOKEN });
const open = new Set(); // deliveries that are not settled yet
let all;
const done = new Promise((resolve) => (all = resolve));

await hub.subscribe(
  "orders.packed",
  "carrier",
  (event, delivery) => {
    console.log(`order ${event.payload.order}, attempt ${delivery.attempt}`);
    if (delivery.attempt === 1) delivery.nack("the van is full", 500); // milliseconds
    else open.add(delivery);
    if (open.size === 1) all();
  },
  { ack: "manual" },
);
await hub.publish("orders.packed", { order: 7 });
await done;
for (const delivery of open) console.log(`settled: ${delivery.ack()}, and again: ${delivery.ack()}`);
await hub.close();
// Prints: order 7, attempt 1
// Prints: order 7, attempt 2
// Prints: settled: true, and again: false
