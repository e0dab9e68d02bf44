// Has events stored later: after a delay, or at a time.
import { connect } from "eventhub-client";

const hub = await connect(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", { token: process.env.EVENTHUB_TOKEN });
let all;
const done = new Promise((resolve) => (all = resolve));
await hub.subscribe("reminders", "clock", ({ payload }) => {
  console.log(payload);
  if (payload === "in a second") all();
});
await hub.publish("reminders", "now");
await hub.publish("reminders", "in half a second", { at: Date.now() + 500 });
await hub.publish("reminders", "in a second", { delay_ms: 1_000 });
await done;
await hub.close();
// Prints: now
// Prints: in half a second
// Prints: in a second
