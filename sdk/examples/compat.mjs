// Programs of the older clients change the import, and nothing else.
import { EventClient, PromClient } from "eventhub-client/compat";

const url = process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090";
const token = process.env.EVENTHUB_TOKEN;

const events = new EventClient(url, token);
const seen = new Promise((resolve) => {
  void events.subscribe("beats", "ops", (event, ctx) => {
    events.modAck("beats", "ops", event.id, 60_000); // more time for this event
    resolve(`${event.payload.name}, attempt ${ctx.attempt}`);
  });
});
const { op, id } = await events.publish("beats", { name: "stt" }, { tags: ["example"] });
console.log(op, id.length, await seen);
await events.unsubscribe("beats", "ops");
await events.close();

const prom = new PromClient(url, token);
const came = new Promise((resolve) => {
  void prom.subscribe("pulses", "page", (event) => resolve(event.payload.pulse)).then(() => prom.publish("pulses", { pulse: 60 }));
});
console.log(await came);
prom.close();
// Prints: OK 36 stt, attempt 1
// Prints: 60
