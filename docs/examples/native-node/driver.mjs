// For the tests of this repository: does with nats.js what it reads, a JSON object a line, and
// answers each line with one.
import { createInterface } from "node:readline";

import { jetstream } from "@nats-io/jetstream";
import { Kvm } from "@nats-io/kv";
import { connect, headers } from "@nats-io/transport-node";

import { decode } from "./eventhub.mjs";

const nc = await connect({ servers: process.env.NATS_URL, token: process.env.NATS_TOKEN });
const js = jetstream(nc);
const kv = (bucket) => new Kvm(nc).open(bucket);
const updates = new Map();

const does = {
  async publish({ subject, header, body }) {
    const h = headers();
    for (const [name, value] of Object.entries(header ?? {})) h.set(name, value);
    const { stream, seq } = await js.publish(subject, Buffer.from(body ?? "", "base64"), { headers: h });
    return { stream, seq };
  },
  async next({ stream, consumer, settle }) {
    const message = await (await js.consumers.get(stream, consumer)).next({ expires: 30_000 });
    if (message === null) throw new Error("no message came");
    const header = {};
    for (const [name, values] of message.headers ?? []) header[name] = values[0];
    const answer = {
      subject: message.subject, header, body: Buffer.from(message.data).toString("base64"), tries: message.info.deliveryCount, record: decode(message),
    };
    message[settle]();
    await nc.flush();
    return answer;
  },
  async get({ bucket, key }) {
    const entry = await (await kv(bucket)).get(key);
    return { body: entry?.operation === "PUT" ? Buffer.from(entry.value).toString("base64") : null };
  },
  async watch({ bucket, key }) {
    updates.set(bucket, (await (await kv(bucket)).watch({ key, include: "updates" }))[Symbol.asyncIterator]());
    await nc.flush();
    return {};
  },
  async update({ bucket }) {
    const { value } = await updates.get(bucket).next();
    return { body: Buffer.from(value.value).toString("base64") };
  },
};

console.log(JSON.stringify({})); // it is connected
for await (const line of createInterface({ input: process.stdin })) {
  const { op, ...request } = JSON.parse(line);
  try {
    console.log(JSON.stringify(await does[op](request)));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error) }));
  }
}
await nc.close();
