// Publishes while there is no connection, and stays a member of its group over a break. A relay
// in front of the hub stands for a network that fails.
import { createServer, connect as dial } from "node:net";
import { createClient } from "eventhub-client";

const { hostname, port } = new URL(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090");
const sockets = new Set();
const relay = createServer((near) => {
  const far = dial(Number(port), hostname);
  near.pipe(far).pipe(near);
  for (const socket of [near, far]) sockets.add(socket.on("error", () => {}));
});
const listen = (at) => new Promise((resolve) => relay.listen(at, "127.0.0.1", () => resolve(relay.address().port)));
const at = await listen(0);
await new Promise((resolve) => relay.close(resolve)); // the address is known, and nobody is there

const hub = createClient(`ws://127.0.0.1:${at}`, { token: process.env.EVENTHUB_TOKEN, minPauseMs: 50, maxPauseMs: 500 });
hub.on("state", (state) => (state === "ready" || state === "closed") && console.log(state));
const got = [];
const joined = hub.subscribe("trains", "board", (event) => void got.push(event.payload));
const early = hub.publish("trains", "waits for a connection");
await listen(at);
await early;
await joined;

for (const socket of sockets) socket.destroy(); // the network fails
await hub.publish("trains", "is sent by the next connection");
while (!got.includes("is sent by the next connection")) await new Promise((resolve) => setTimeout(resolve, 10));
console.log("the member is still there");
await hub.close();
relay.close();
// Prints: ready
// Prints: ready
// Prints: the member is still there
// Prints: closed
