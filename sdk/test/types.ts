// Compiled, and not run: what the types promise, and what they refuse.
import { connect, createClient, dedupe, latest, memoryStore, type EventRecord, type StandardSchema } from "eventhub-client";
import { broadcast, events, watch, type Gap } from "eventhub-client/broadcast";
import { EventClient, PromClient } from "eventhub-client/compat";
import type { Topics as Written } from "./topics.js";

type Topics = {
  "orders.placed": { order: number };
  "orders.paid": { order: number; total: number };
};

export async function typed(schema: StandardSchema<{ order: number }>): Promise<void> {
  const client = createClient<Topics>("ws://127.0.0.1:8090", { token: () => "fresh", schemas: { "orders.placed": schema } });
  const id: string = await client.publish("orders.placed", { order: 7 }, { key: "k" });
  // @ts-expect-error the payload belongs to another topic
  await client.publish("orders.paid", { order: 7 });
  // @ts-expect-error there is no such topic
  await client.publish("orders.lost", { order: 7 });
  // @ts-expect-error there is no such option
  await client.publish("orders.placed", { order: 7 }, { kee: "k" });
  const subscription = await client.subscribe("orders.paid", "billing", (event, delivery) => {
    const total: number = event.payload.total;
    delivery.extend(total);
    // @ts-expect-error the payload has no such field
    return event.payload.vat;
  });
  await subscription.pause();
  for await (const { event } of client.events("orders.placed", "loop")) {
    const order: number = event.payload.order;
    console.log(order, id);
  }
  const ids: string[] = await client.publishMany("orders.placed", [{ payload: { order: 1 }, id: "one" }]);
  // @ts-expect-error the payload belongs to another topic
  await client.publishMany("orders.paid", [{ payload: { order: 1 } }]);
  console.log(ids);
}

// What eventhub schema types writes.
export async function written(): Promise<void> {
  const client = createClient<Written>("ws://127.0.0.1:8090", { token: "t" });
  await client.publish("hosts", { host: "a", state: "up", pair: ["x", true], labels: { room: "7" }, "a-b": 'x"y' });
  // @ts-expect-error there is no such state
  await client.publish("hosts", { host: "a", state: "gone" });
  // @ts-expect-error the state is missing
  await client.publish("hosts", { host: "a" });
  // @ts-expect-error there is no such member
  await client.publish("hosts", { host: "a", state: null, sate: "up" });
  // @ts-expect-error the second of a pair is no text
  await client.publish("hosts", { host: "a", state: 7, pair: ["x", "y"] });
  await client.publish("carts.paid", { cart: 1, by: { kind: "cash" }, parent: { cart: 0, by: { kind: "card", card: "4" } } });
  // @ts-expect-error a card has a number
  await client.publish("carts.paid", { cart: 1, by: { kind: "card" } });
  await client.publish("carts-paid", { a: "x", b: null, c: 1 });
  await client.publish("7.things", ["x", [null]]);
  // @ts-expect-error no number
  await client.publish("7.things", [1]);
  await client.publish("open", Symbol.iterator.description);
}

export async function untyped(): Promise<void> {
  const client = await connect("ws://127.0.0.1:8090", { token: "t" });
  await client.publish<{ n: number }>("any", { n: 1 });
  // @ts-expect-error the type says otherwise
  await client.publish<{ n: number }>("any", { n: "1" });
  const handler = dedupe<{ n: number }>((event) => console.log(event.payload.n), memoryStore());
  await client.subscribe<{ n: number }>("any", "g", handler, { ack: "manual", concurrency: 4, groupTtlMs: 60_000, ordered: "key", slots: 8, extra: { later: 1 } });
  client.on("assign", ({ topic, slots }) => console.log(topic, slots.length satisfies number));
  const record: EventRecord<{ n: number }> | undefined = await latest<{ n: number }>({ http: "http://127.0.0.1:8081" }, "any", "key");
  console.log(record?.payload.n);
}

export async function live(): Promise<void> {
  const client = createClient<Topics>("ws://127.0.0.1:8090");
  const gaps: Gap[] = [];
  const made = await broadcast<{ order: number }>(client, "orders.placed", (event, { pos }) => console.log(event.payload.order satisfies number, pos), { slow: "catchup", onGap: (gap) => void gaps.push(gap) });
  // @ts-expect-error there is no such option
  await broadcast(client, "orders.placed", () => {}, { group: "g" });
  await made.unsubscribe();
  for await (const { event } of events<number>(client, "any", { from: "ts", ts: 0 })) console.log(event.payload.toFixed());
  await watch<string>(client, "state", ({ key, event, deleted }) => console.log(key, event?.payload.length, deleted satisfies boolean));
}

export async function older(): Promise<void> {
  const a = new EventClient("ws://127.0.0.1:8090", "t");
  const { id } = await a.publish("any", 1);
  await a.subscribe("any", "g", (event, ctx) => a.modAck("any", "g", event.id, ctx.ack_deadline_ms));
  const b = new PromClient("ws://127.0.0.1:8090");
  await b.subscribe<{ n: number }>("any", id, (event) => event.payload.n);
  b.close();
}
