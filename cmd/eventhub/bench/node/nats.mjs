// nats.js over the WebSocket listener of a nats-server.
import { jetstream } from "@nats-io/jetstream";
import { wsconnect } from "@nats-io/nats-core";
import WebSocket from "ws";

// nats.js wants the WebSocket of the platform, which Node has since version 22. It is given the
// same one in every version.
globalThis.WebSocket = WebSocket;

/** One connection that is a publisher or reads a consumer. */
export async function openNATS({ url, token, subject, stream, group, inFlight, noAsyncTraces }) {
  const nc = await wsconnect({ servers: url, token, noAsyncTraces });
  const js = jetstream(nc);
  let messages;
  return {
    publish: (payload) => js.publish(subject, JSON.stringify(payload)),
    async consume(handle) {
      const consumer = await js.consumers.get(stream, group);
      messages = await consumer.consume({
        max_messages: inFlight,
        callback: (m) => {
          handle(m.json());
          m.ack();
        },
      });
    },
    settle: () => nc.flush(),
    async close() {
      await messages?.close();
      await nc.close();
    },
  };
}
