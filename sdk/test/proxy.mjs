// A TCP proxy between a client and the hub, which breaks connections as a network does.
import { once } from "node:events";
import { connect, createServer } from "node:net";

export async function startProxy(target) {
  const { hostname, port } = new URL(target);
  const pairs = new Set();
  let deaf = false; // what the hub answers does not arrive
  let refusing = false;
  const server = createServer((client) => {
    if (refusing) {
      client.destroy();
      return;
    }
    const hub = connect(Number(port), hostname);
    const pair = { client, hub };
    pairs.add(pair);
    const end = () => {
      pairs.delete(pair);
      client.destroy();
      hub.destroy();
    };
    for (const socket of [client, hub]) socket.on("error", end).on("close", end).setNoDelay(true);
    client.on("data", (data) => hub.write(data));
    hub.on("data", (data) => deaf || client.write(data));
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  return {
    url: `ws://127.0.0.1:${server.address().port}`,
    get connections() {
      return pairs.size;
    },
    cut() {
      for (const { client, hub } of [...pairs]) {
        client.destroy();
        hub.destroy();
      }
    },
    deafen(value) {
      deaf = value;
    },
    refuse(value) {
      refusing = value;
    },
    async stop() {
      this.cut();
      server.close();
    },
  };
}

/** Cuts a client's connection, and waits until it has another. */
export async function cutOnce(proxy, client) {
  const lost = new Promise((resolve) => {
    const off = client.on("state", (state) => {
      if (state !== "waiting") return;
      off();
      resolve();
    });
  });
  proxy.cut();
  await lost;
  await client.ready();
}
