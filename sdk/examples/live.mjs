// Follows a topic live, without a group.
import { connect } from "eventhub-client";
import { broadcast } from "eventhub-client/broadcast";

const hub = await connect(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", { token: process.env.EVENTHUB_TOKEN });
const topic = `prices.${crypto.randomUUID()}`; // a new topic each time
await hub.publish(topic, 100, { key: "tea" });
let all;
const done = new Promise((resolve) => (all = resolve));
const show = (event) => {
  console.log(`${event.key} costs ${event.payload}`);
  if (event.payload === 101) all();
};
await broadcast(hub, topic, show, {
  history: 10,
  onGap: ({ missed }) => console.log("missed", missed),
  onReset: ({ reason }) => console.log("missed an unknown number:", reason),
});
await hub.publish(topic, 101, { key: "tea" });
await done;
await hub.close();
// Prints: tea costs 100
// Prints: tea costs 101
