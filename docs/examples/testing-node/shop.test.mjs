import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { startHub } from "./hub.mjs";
import { place } from "./shop.mjs";

let hub;
before(async () => {
  hub = await startHub();
});
after(() => hub.stop());

/** The first event of a topic. */
function firstEvent(topic) {
  return new Promise((resolve, reject) => {
    const ws = new WebSocket(hub.websocket);
    const send = (frame) => ws.send(JSON.stringify(frame));
    ws.onerror = () => reject(new Error("the connection failed"));
    ws.onopen = () => {
      send({ op: "AUTH", token: hub.token });
      send({ op: "SUBSCRIBE", topic, group: "test", opts: { from: "earliest" } });
    };
    ws.onmessage = ({ data }) => {
      const frame = JSON.parse(data);
      if (frame.op === "ERR") reject(new Error(frame.msg));
      if (frame.op !== "EVENT") return;
      resolve(frame.event);
      ws.close();
    };
  });
}

test("an order is an event", async () => {
  await place(hub, 7, "ann");
  const event = await firstEvent("orders.placed");
  assert.equal(event.key, "ann");
  assert.deepEqual(event.payload, { order: 7 });
});

test("a shop without a token places no order", async () => {
  await assert.rejects(place({ ...hub, token: "wrong" }, 8, "ann"), /place order 8/);
});
