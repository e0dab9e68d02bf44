// Publishes as fast as the hub stores, and no faster: the source is asked only when there is room.
import { connect } from "eventhub-client";

const hub = await connect(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", { token: process.env.EVENTHUB_TOKEN });
let most = 0;
async function* readings() {
  for (let i = 0; i < 500; i++) {
    most = Math.max(most, hub.pending);
    yield { payload: { celsius: 20 + (i % 5) }, key: `sensor:${i % 3}` };
  }
}
const ids = await hub.publishMany("sensor.temperatures", readings(), { inFlight: 8 });
console.log(`${ids.length} events are stored; at most 8 were on their way: ${most <= 8}`);
await hub.close();
// Prints: 500 events are stored; at most 8 were on their way: true
