// Just enough of a native NATS client to do to a hub's streams what the hub does not do itself.
import { once } from "node:events";
import { connect } from "node:net";
import { createInterface } from "node:readline";

/** Asks the API of JetStream one question. */
export async function jetstream({ nats, token }, subject, question = "") {
  const { hostname, port } = new URL(nats);
  const socket = connect(Number(port), hostname);
  try {
    await once(socket, "connect");
    const options = JSON.stringify({ auth_token: token, verbose: false, pedantic: false });
    socket.write(`CONNECT ${options}\r\nSUB inbox 1\r\nPUB $JS.API.${subject} inbox ${Buffer.byteLength(question)}\r\n${question}\r\n`);
    for await (const line of createInterface(socket)) {
      if (line === "PING") socket.write("PONG\r\n");
      if (line.startsWith("-ERR")) throw new Error(line);
      if (!line.startsWith("{")) continue;
      const answer = JSON.parse(line);
      if (answer.error) throw new Error(`${subject}: ${answer.error.description}`);
      return answer;
    }
    throw new Error(`${subject}: the connection ended`);
  } finally {
    socket.destroy();
  }
}

/** Deletes the stream of a topic. */
export async function deleteStream(hub, topic) {
  const { streams } = await jetstream(hub, "STREAM.NAMES", JSON.stringify({ subject: `event.${topic}` }));
  await jetstream(hub, `STREAM.DELETE.${streams[0]}`);
}
