// Events in a version of their schema.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { connect } from "eventhub-client";
import { broadcast } from "eventhub-client/broadcast";
import { eventually, newTopic, startHub } from "./hub.mjs";

let hub;
before(async () => {
  hub = await startHub();
});
after(() => hub.stop());

test("a group and a broadcast get events in the version that they ask for", async () => {
  const topic = newTopic();
  for (const draft of [
    { schema: { type: "object", required: ["host"] } },
    { schema: { type: "object", required: ["name"] }, up: [{ rename: { at: "/host", to: "name", required: true } }], force: true },
  ]) {
    const { status } = await fetch(`${hub.http}/schemas/${topic}`, { method: "POST", headers: { authorization: `Bearer ${hub.token}` }, body: JSON.stringify(draft) });
    assert.equal(status, 201);
  }
  const client = await connect(hub.websocket, { token: hub.token });
  const got = {};
  await client.subscribe(topic, "first", (event) => void (got.first = event.payload), { schemaVersion: 1 });
  await client.subscribe(topic, "latest", (event) => void (got.latest = event.payload), { schemaVersion: "latest" });
  await broadcast(client, topic, (event) => void (got.broadcast = event.payload), { schemaVersion: 2 });
  await client.publish(topic, { host: "a" });
  await eventually("all have the event", () => Object.keys(got).length === 3);
  assert.deepEqual(got, { first: { host: "a" }, latest: { name: "a" }, broadcast: { name: "a" } });
  await client.close();
});
