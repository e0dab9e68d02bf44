// A program with the TypeScript client, for the model checker: libraries_test.go compiles the
// client and starts it. It prints what its handlers and publishes saw as lines of JSON, and ends
// when its standard input ends.
import { connect } from "../../../../sdk/dist/esm/index.js";

const { url, token, topics, members, first } = JSON.parse(process.argv[2]);
const say = (what) => process.stdout.write(JSON.stringify({ client: "ts", ...what }) + "\n");
const note = (error) => process.stdout.write(`note ${String(error?.code ?? error).replaceAll("\n", " ")}\n`);
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

let ended = false;
process.stdin.on("end", () => (ended = true)).resume();

let hub;
while (!hub && !ended) {
  hub = await connect(url, { token, minPauseMs: 20, maxPauseMs: 300 }).catch(note);
}
for (const { topic, group, from } of members) {
  const handle = async (event, delivery) => {
    say({ topic: event.topic, group, id: event.id, attempt: delivery.attempt });
    await pause(Math.random() * 150);
    if (Math.random() < 0.1) throw new Error("refused by a handler");
  };
  (async () => {
    while (!ended) {
      const joined = await hub.subscribe(topic, group, handle, { from, concurrency: 4, ackTimeoutMs: 3000, maxAttempts: 0 }).catch(note);
      if (joined) return;
      await pause(200);
    }
  })();
}
for (let n = first; hub && !ended; n++) {
  const topic = topics[n % topics.length];
  hub.publish(topic, { n }, { key: `host:${n % 5}` }).then((id) => say({ topic, id, n }), note);
  await pause(Math.random() * 100);
}
await Promise.race([hub?.close().catch(note), pause(5000)]);
process.exit(0);
