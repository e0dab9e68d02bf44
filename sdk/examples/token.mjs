// Gets short-lived tokens from a service. The client asks for the next one before the last expires,
// and keeps its connection. Run it with JWT_SECRET set to the secret of the hub.
import { createHmac } from "node:crypto";
import { createServer } from "node:http";
import { connect } from "eventhub-client";

// Instead of this service, yours checks who asks.
let signed = 0;
const part = (value) => Buffer.from(JSON.stringify(value)).toString("base64url");
const service = createServer((_, response) => {
  const exp = Math.floor(Date.now() / 1000) + 3; // seconds
  const text = `${part({ alg: "HS256", typ: "JWT" })}.${part({ sub: "shop-7", jti: `${++signed}`, exp, scopes: ["publish:sales.*", "subscribe:sales.*::till"] })}`;
  response.end(`${text}.${createHmac("sha256", process.env.JWT_SECRET).update(text).digest("base64url")}`);
}).listen(0, "127.0.0.1");
await new Promise((resolve) => service.once("listening", resolve));

const token = async () => (await fetch(`http://127.0.0.1:${service.address().port}/`)).text();
const hub = await connect(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", { token });
let breaks = 0;
hub.on("state", (state) => state === "waiting" && breaks++);

let sold;
const sale = new Promise((resolve) => (sold = resolve));
await hub.subscribe("sales.coffee", "till", ({ payload }) => sold(payload.cups));
while (signed < 3) await new Promise((resolve) => setTimeout(resolve, 50));
await hub.publish("sales.coffee", { cups: 2 });
console.log(`${await sale} cups, with the third token on the first connection: ${breaks === 0}`);
await hub.publish("prices.coffee", 1).catch((error) => console.log(error.code));
await hub.close();
service.close().closeAllConnections();
// Prints: 2 cups, with the third token on the first connection: true
// Prints: forbidden
