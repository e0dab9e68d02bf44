// Prints every greeting, and sends one of its own. It needs Node 22, and no package.
import { readFileSync } from "node:fs";

const url = process.env.EVENTHUB_URL ?? "ws://127.0.0.1:8090";
const { EVENTHUB_TOKEN, WS_TOKEN } = process.env;
const token = EVENTHUB_TOKEN ?? WS_TOKEN ?? readFileSync("eventhub-data/token", "utf8").trim();
const place = { topic: "greetings", group: "node" };
let greeted = false;

function connect(pause = 1000) {
  const hub = new WebSocket(url);
  const send = (frame) => hub.send(JSON.stringify(frame));

  hub.onopen = () => {
    pause = 1000;
    send({ op: "AUTH", token, corr: "auth" });
    send({ op: "SUBSCRIBE", ...place, corr: "subscribe" });
    if (!greeted) send({ op: "PUBLISH", topic: place.topic, payload: "hello from Node", corr: "hello",
      opts: { id: `hello-node-${process.pid}` } }); // with an id, it is safe to repeat
  };

  hub.onmessage = ({ data }) => {
    const frame = JSON.parse(data);
    switch (frame.op) {
      case "OK":
        greeted ||= frame.corr === "hello";
        break;
      case "EVENT":
        console.log(frame.event.payload);
        send({ op: "ACK", ...place, id: frame.event.id });
        break;
      case "ERR":
        console.error(`${frame.corr}: ${frame.code}: ${frame.msg}`);
    }
  };

  // After a failed attempt to connect, some versions of Node call onerror alone, others both.
  let timer;
  const reconnect = () => {
    timer ??= setTimeout(connect, pause, Math.min(2 * pause, 30_000));
  };
  hub.onerror = reconnect;
  hub.onclose = ({ code, reason }) => {
    if (code >= 4100 && code <= 4199) {
      throw new Error(`the hub closed the connection for good: ${code} ${reason}`);
    }
    reconnect();
  };
}

connect();
