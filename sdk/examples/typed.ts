// Topics with types: the compiler checks names and payloads.
import { createClient } from "eventhub-client";

type Topics = {
  "carts.filled": { cart: number; items: string[] };
  "carts.paid": { cart: number; cents: number };
};

const hub = createClient<Topics>(process.env["EVENTHUB_URL"] ?? "ws://127.0.0.1:8090", { token: process.env["EVENTHUB_TOKEN"] ?? "" });
const paid = new Promise<void>((done) => {
  void hub.subscribe("carts.paid", "books", (event) => {
    console.log(`${(event.payload.cents / 100).toFixed(2)} for cart ${event.payload.cart}`);
    done();
  });
});
await hub.publish("carts.filled", { cart: 1, items: ["tea"] });
await hub.publish("carts.paid", { cart: 1, cents: 350 });
await paid;
await hub.close();

// @ts-expect-error there is no such topic
export const unknown = () => hub.publish("carts.stolen", { cart: 1 });
// @ts-expect-error a cart that is paid has cents
export const incomplete = () => hub.publish("carts.paid", { cart: 1 });
// Prints: 3.50 for cart 1
