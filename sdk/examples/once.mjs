// Handles each event once, though it may be delivered twice.
import { connect, dedupe, memoryStore } from "eventhub-client";

const hub = await connect(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", { token: process.env.EVENTHUB_TOKEN });
const store = memoryStore(); // a service keeps this in its database
const pay = dedupe((event) => console.log(`paid ${event.payload.order}`), store);

const { promise, resolve } = deferred();
await hub.subscribe("orders.due", "payer", async (event, delivery) => {
  await pay(event, delivery);
  if (delivery.attempt === 1) throw new Error("the process fails after the payment");
  resolve();
});
await hub.publish("orders.due", { order: 7 });
await promise;
await hub.close();

function deferred() {
  let resolve;
  const promise = new Promise((r) => (resolve = r));
  return { promise, resolve };
}
// Prints: paid 7
