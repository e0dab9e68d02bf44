// Reads the latest record of a key, lists all keys, and replays a topic, over HTTP.
import { connect, latest, replay, snapshot } from "eventhub-client";

const token = process.env.EVENTHUB_TOKEN;
const http = process.env.EVENTHUB_HTTP ?? "http://127.0.0.1:8081";
const hub = await connect(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", { token });
await hub.publish("process.state", { status: "alive" }, { key: "example:1" });
await hub.close();

const record = await latest({ http, token }, "process.state", "example:1");
console.log(record.payload.status);

let keys = 0;
for await (const { key } of snapshot({ http, token }, "process.state")) if (key === "example:1") keys++;
console.log(keys <= 1); // a listing may lag behind

for await (const event of replay({ http, token }, "process.state", { key: "example:1", limit: 1 })) console.log(event.key);
// Prints: alive
// Prints: true
// Prints: example:1
