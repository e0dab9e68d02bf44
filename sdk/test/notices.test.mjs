// What the hub tells without being asked: each cause is real.
import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { connect } from "eventhub-client";
import { eventually, newTopic, startHub } from "./hub.mjs";
import { deleteStream } from "./nats.mjs";

let hub, dir, client;
before(async () => {
  dir = mkdtempSync(join(tmpdir(), "eventhub-notices-"));
  writeFileSync(join(dir, "topics.yaml"), "topics:\n  - pattern: short.*\n    retention: {messages: 10}\n");
  hub = await startHub([`--topics=${join(dir, "topics.yaml")}`]);
  client = await connect(hub.websocket, { token: hub.token });
});
after(async () => {
  await client.close();
  await hub.stop();
  rmSync(dir, { recursive: true });
});

/** What a client is told and given from now on, in its order. */
function story(of) {
  const told = [];
  const offs = [
    of.on("notice", ({ code, topic, group }) => told.push([code, topic, group])),
    of.on("error", ({ code }) => told.push(["error", code])),
  ];
  return { told, end: () => offs.forEach((off) => off()) };
}

test("events_lost comes before the first event that is left, for each group that is overtaken", async () => {
  const topic = `short.${newTopic().slice(2)}`;
  const { told, end } = story(client);
  const messages = [];
  const off = client.on("notice", ({ message }) => messages.push(message));
  const late = await client.subscribe(topic, "late", (event) => void told.push(event.payload));
  const prompt = [];
  await client.subscribe(topic, "prompt", (event) => void prompt.push(event.payload));
  await client.publish(topic, 0);
  await eventually("the first event", () => told.length === 1);
  await late.pause();
  for (let i = 1; i <= 30; i++) {
    await client.publish(topic, i);
    await eventually("the other group keeps up", () => prompt.length === i + 1);
  }
  await late.resume();
  await eventually("what is left", () => told.length === 12);
  assert.deepEqual(told, [0, ["events_lost", topic, "late"], ...Array.from({ length: 10 }, (_, i) => 21 + i)]);
  assert.match(messages[0], new RegExp(`^${topic}::late lost 20 events stored since 2\\d{3}-`));
  assert.equal(messages.length, 1);
  off();
  end();
});

test("group_reset comes when the stream under a group was deleted, and the group goes on", async () => {
  const topic = newTopic();
  const { told, end } = story(client);
  const subscription = await client.subscribe(topic, "g", (event) => void told.push(event.payload));
  await client.publish(topic, "before");
  await eventually("the event", () => told.length === 1);
  await deleteStream(hub, topic);
  await eventually("the notice", async () => {
    await client.publish(topic, "after").catch(() => {}); // makes the stream again
    return told.some(([code]) => code === "group_reset");
  });
  await client.publish(topic, "last");
  await eventually("the last event", () => told.at(-1) === "last");
  assert.deepEqual(
    told.filter((one) => Array.isArray(one)),
    [["group_reset", topic, "g"]],
  );
  assert.equal(await Promise.race([subscription.closed, "open"]), "open");
  end();
});
