// Decides by the code of an error.
import { connect, EventHubError } from "eventhub-client";

const hub = await connect(process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090", { token: process.env.EVENTHUB_TOKEN });
try {
  await hub.publish("orders..placed", { order: 7 });
} catch (error) {
  if (!(error instanceof EventHubError)) throw error;
  console.log(error.code, error.retryable);
}
await hub.close();
// Prints: bad_topic false
