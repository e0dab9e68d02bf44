// Publishes an order, and handles it. Run it with EVENTHUB_TOKEN set to the hub's token.
import { connect } from "eventhub-client";

const hub = await connect(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", { token: process.env.EVENTHUB_TOKEN });

let mailed;
const mail = new Promise((resolve) => (mailed = resolve));
await hub.subscribe("orders.placed", "mailer", (event) => {
  console.log(`mail for order ${event.payload.order}`);
  mailed(); // the end of the handler acknowledges the event
});
await hub.publish("orders.placed", { order: 7 }, { key: "customer:1" });
await mail;
await hub.close(); // sends the acknowledgement first
// Prints: mail for order 7
