// Learns that a group has lost events. The hub needs a topics file with a rule such as
//   - {pattern: "ticker.*", retention: {messages: 10}}
import { connect } from "eventhub-client";

const hub = await connect(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", { token: process.env.EVENTHUB_TOKEN });
hub.on("notice", ({ code, topic, group }) => console.log(code, topic, group));
hub.on("error", (error) => console.log(error.code)); // what no call reports

let last;
const subscription = await hub.subscribe("ticker.gold", "chart", (event) => void (last = event.payload));
await subscription.pause();
for (let price = 1; price <= 30; price++) await hub.publish("ticker.gold", price);
await subscription.resume();
while (last !== 30) await new Promise((resolve) => setTimeout(resolve, 10));
await hub.close();
// Prints: events_lost ticker.gold chart
