// Checks payloads with a schema: of Valibot here, or of any other library of Standard Schema.
import { connect } from "eventhub-client";
import * as v from "valibot";

const schemas = { "orders.sent": v.object({ order: v.number(), by: v.optional(v.string(), "van") }) };
const [url, token] = [process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", process.env.EVENTHUB_TOKEN];
const hub = await connect(url, { token, schemas });
const unchecked = await connect(url, { token });
let all;
const done = new Promise((resolve) => (all = resolve));
await hub.subscribe("orders.sent", "tracker", ({ payload }) => console.log(`by ${payload.by}`), { maxAttempts: 1 });
await unchecked.subscribe("dlq.orders.sent", "operators", ({ payload }) => {
  console.log(`dead letter: ${payload.err}`);
  all();
});

// A publish that does not fit fails here. A default is filled in.
await hub.publish("orders.sent", { order: "7" }).catch((error) => console.log(error.code));
await hub.publish("orders.sent", { order: 7 });
// An event of another client that does not fit is refused, and becomes a dead letter.
await unchecked.publish("orders.sent", { order: "8" });
await done;
await Promise.all([hub.close(), unchecked.close()]);
// Prints: invalid
// Prints: by van
// Prints: dead letter: invalid payload: order: Invalid type: Expected number but received "8"
