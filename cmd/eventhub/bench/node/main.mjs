// The Node side of `eventhub bench node`, which starts it as `node main.mjs hub|sdk|nats pub|sub`.
//
// It takes one JSON object a line on standard input and answers each with one: {"do":"open", …}
// connects, {"do":"run"} does the work, {"do":"close"} disconnects. So the harness measures time
// and CPU right around the run, as it does for its own clients, and one process serves all rounds:
// in a service that runs for long the code has been optimised too.
import { createInterface } from "node:readline";
import { openHub } from "./hub.mjs";
import { openNATS } from "./nats.mjs";
import { openSDK } from "./sdk.mjs";
import { consume, publish } from "./work.mjs";

const systems = { hub: openHub, sdk: openSDK, nats: openNATS };
const works = { pub: publish, sub: consume };
const [system, kind] = process.argv.slice(2);
const open = systems[system];
const work = works[kind];
if (!open || !work) {
  console.error("usage: node main.mjs hub|sdk|nats pub|sub");
  process.exit(2);
}

let job;
let connections = [];

const steps = {
  async open(request) {
    job = request;
    connections = [];
    for (let i = 0; i < job.connections; i++) connections.push(await open(job));
    return {};
  },
  async run() {
    await work(connections, job);
    return {};
  },
  async close() {
    await Promise.all(connections.map((c) => c.close()));
    connections = [];
    return {};
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  const answer = await steps[request.do](request).catch((err) => ({ error: err?.stack ?? String(err) }));
  console.log(JSON.stringify(answer));
}
process.exit(0); // the harness has gone, and so may connections that still stand
