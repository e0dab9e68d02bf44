// EVENT frames are read by comparison where they can be, and by JSON.parse elsewhere. Nobody can
// tell the difference.
import assert from "node:assert/strict";
import { test } from "node:test";
import { rig, Socket } from "./rig.mjs";

const topic = "a.topic";
const group = 'g"é\n';
const head = `{"op":"EVENT","topic":"${topic}","group":${JSON.stringify(group)},"event":`;
const tail = ',"ctx":{"attempt":1,"ack_deadline_ms":30000}}';
const usual = (payload, id = "0190aaaa-bbbb-7ccc-8ddd-eeeeeeeeeeee") => `${head}{"id":"${id}","ts":1763838000000,"topic":"${topic}","payload":${payload}}${tail}`;
const odd = (event, ctx = tail) => `${head}${event}${ctx}`;

const texts = {
  "a usual one": usual('{"n":1}'),
  "a scalar": usual("12345678901234567890"),
  null: usual("null"),
  "line breaks in the payload": usual('{\n "n" : [ 1,\r\n 2 ] }'),
  "the end of a frame in the payload": usual(JSON.stringify({ text: `}${tail}`, more: [`"}${tail}`] })),
  "a payload that ends as the frame does": usual(`{"event":{}${tail}`),
  "__proto__ in the payload": usual('{"__proto__":{"polluted":true}}'),
  "text beyond ASCII": usual('"é漢字😀\\ud800"'),
  "an id with an escape": usual("1", 'a\\"b\\\\'),
  "an id with an escape and no quote": usual("1", "a\\u0042"),
  "an id that looks like more": usual("1", 'a\\",\\"ts\\":9'),
  "an id beyond ASCII": usual("1", "é😀"),
  "a short id": usual("1", "x"),
  "a time of 0": usual("1").replace("1763838000000", "0"),
  "the largest time": usual("1").replace("1763838000000", "9007199254740991"),
  "a negative time": usual("1").replace("1763838000000", "-1"),
  "a time in another form": usual("1").replace("1763838000000", "1.5e3"),
  "blanks between the fields": usual("1").replace('"ts":', '"ts": '),
  "a key": odd(`{"id":"i","ts":1,"topic":"${topic}","key":"k\\"","payload":1}`),
  "all fields": odd(`{"id":"i","ts":1,"topic":"${topic}","key":"k","sid":"s","headers":{"a":"b"},"caused_by":["c"],"tags":["t"],"payload":{"p":1}}`),
  "another topic": odd('{"id":"i","ts":1,"topic":"other","payload":1}'),
  "a field behind the payload": odd(`{"id":"i","ts":1,"topic":"${topic}","payload":1,"later":true}`),
  "another order": odd(`{"ts":1,"id":"i","topic":"${topic}","payload":1}`),
  "a second delivery": odd(`{"id":"i","ts":1,"topic":"${topic}","payload":1}`, ',"ctx":{"attempt":2,"ack_deadline_ms":30000}}'),
  "another deadline": odd(`{"id":"i","ts":1,"topic":"${topic}","payload":1}`, ',"ctx":{"attempt":1,"ack_deadline_ms":999}}'),
  "a field behind ctx": odd(`{"id":"i","ts":1,"topic":"${topic}","payload":1}`, `,"ctx":{"attempt":3,"ack_deadline_ms":5},"later":{"a":1}${tail}`),
};

for (const [name, text] of Object.entries(texts)) {
  test(`an event as JSON.parse reads it: ${name}`, async () => {
    const got = [];
    const { client, to } = rig();
    await to.ready();
    const handler = (event, { attempt, ack_deadline_ms }) => void got.push({ event, attempt, ack_deadline_ms });
    void client.subscribe(topic, group, handler, { ack: "manual" }).catch(() => {});
    const { corr } = Socket.all.at(-1).sent.at(-1);
    Socket.all.at(-1).says({ op: "OK", corr });
    // The first frame is parsed in any case.
    for (const data of [usual("0", "first"), text]) Socket.all.at(-1).onmessage({ data });
    const { event, ctx } = JSON.parse(text);
    assert.equal(got.length, 2);
    assert.deepEqual(got[1], { event, ...ctx });
    assert.deepEqual(Object.keys(got[1].event), Object.keys(event));
    await client.close({ timeoutMs: 0 });
  });
}

test("events of subscriptions in turn go to the right handlers", async () => {
  const got = [];
  const { client, to } = rig();
  await to.ready();
  for (const name of ["a", "b"]) {
    void client.subscribe("t", name, (event) => void got.push([name, event.payload])).catch(() => {});
    Socket.all.at(-1).says({ op: "OK", corr: Socket.all.at(-1).sent.at(-1).corr });
  }
  const expected = [];
  for (let i = 0; i < 20; i++) {
    const name = i % 3 === 0 ? "a" : "b";
    Socket.all.at(-1).says({ op: "EVENT", topic: "t", group: name, event: { id: `${i}`, ts: 1, topic: "t", payload: i }, ctx: { attempt: 1, ack_deadline_ms: 30_000 } });
    expected.push([name, i]);
  }
  assert.deepEqual(got, expected);
  await client.close({ timeoutMs: 0 });
});

test("a subscription that follows another of the same name gets its events", async () => {
  const got = [];
  const { client, to } = rig();
  await to.ready();
  const says = (frame) => Socket.all.at(-1).says(frame);
  const deliver = (i) => says({ op: "EVENT", topic: "t", group: "g", event: { id: `${i}`, ts: 1, topic: "t", payload: i }, ctx: { attempt: 1, ack_deadline_ms: 30_000 } });
  for (const name of ["first", "second"]) {
    const joining = client.subscribe("t", "g", (event) => void got.push([name, event.payload]));
    says({ op: "OK", corr: Socket.all.at(-1).sent.at(-1).corr });
    const subscription = await joining;
    deliver(1);
    deliver(2);
    if (name === "first") void subscription.unsubscribe();
  }
  assert.deepEqual(got, [["first", 1], ["first", 2], ["second", 1], ["second", 2]]);
  await client.close({ timeoutMs: 0 });
});
