// The TypeScript client of this repository.
import WebSocket from "ws";
import { connect } from "../../../../sdk/dist/esm/index.js";

/** One connection that is a publisher or a member of a group. */
export async function openSDK({ url, token, topic, group, inFlight }) {
  const client = await connect(url, { token, WebSocket, window: inFlight });
  let subscription;
  return {
    publish: (payload) => client.publish(topic, payload),
    async consume(handle) {
      const options = { from: "earliest", maxInFlight: inFlight, batchSize: inFlight };
      subscription = await client.subscribe(topic, group, (event) => handle(event.payload), options);
    },
    settle: () => subscription.drain(),
    close: () => client.close(),
  };
}
