// Publishes an order, and works as a member of the group "mailer", natively. Members that have
// connected to a hub may share the group.
//
//   eventhub topics create orders.placed
//   NATS_TOKEN=$(cat eventhub-data/token) node orders.mjs
import { jetstream, jetstreamManager } from "@nats-io/jetstream";
import { connect, headers } from "@nats-io/transport-node";

import { consumerName, decode, streamName, subject } from "./eventhub.mjs";

const topic = "orders.placed";
const nc = await connect({ servers: process.env.NATS_URL ?? "nats://127.0.0.1:4222", token: process.env.NATS_TOKEN });
const js = jetstream(nc);

// The group is made once, in one request. One that exists stays as it is.
const manager = await jetstreamManager(nc);
const { state } = await manager.streams.info(streamName(topic));
const group = consumerName(topic, "mailer");
const config = {
  durable_name: group,
  deliver_policy: "by_start_sequence",
  opt_start_seq: state.last_seq + 1, // what is published from now on
  ack_policy: "explicit",
  ack_wait: 30e9, // nanoseconds
  max_ack_pending: 65_536,
  max_waiting: 4_096,
  metadata: { "eventhub.group": "mailer", "eventhub.topic": topic },
};
await manager.consumers.add(streamName(topic), config).catch((error) => {
  if (error.code !== 10148) throw error; // it exists
});

const h = headers();
h.set("Nats-Msg-Id", "order-" + Date.now()); // a repetition within two minutes is stored once
await js.publish(subject(topic, "customer:7"), JSON.stringify({ order: 7 }), { headers: h });

const consumer = await js.consumers.get(streamName(topic), group);
for await (const message of await consumer.consume({ max_messages: 10 })) {
  const keep = setInterval(() => message.working(), 10_000); // the event stays ours
  try {
    console.log(decode(message));
    message.ack();
  } catch {
    message.nak(1_000); // it comes again; to dead-letter it, see docs/native.md
  } finally {
    clearInterval(keep);
  }
  break;
}
await nc.close();
