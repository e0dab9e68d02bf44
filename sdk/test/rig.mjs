// A client on a socket that the test moves.
import { createClient } from "eventhub-client";

export class Socket {
  static all = [];
  readyState = 0;
  sent = [];
  closed = false;
  constructor(url) {
    this.url = url;
    Socket.all.push(this);
  }
  send(text) {
    this.sent.push(JSON.parse(text));
  }
  close() {
    this.closed = true;
    this.readyState = 3;
  }
  opens() {
    this.readyState = 1;
    this.onopen({});
  }
  says(frame) {
    this.onmessage({ data: JSON.stringify(frame) });
  }
  breaks(code = 1006, reason = "") {
    this.readyState = 3;
    this.onclose({ code, reason });
  }
}

/** A client, and what it lives through. */
export function rig(options = {}) {
  Socket.all = [];
  const asked = [];
  const token = () => new Promise((resolve, reject) => asked.push({ resolve, reject }));
  const client = createClient("ws://hub", { WebSocket: Socket, token, minPauseMs: 1, maxPauseMs: 1, ...options });
  const states = [];
  client.on("state", (state, error) => states.push(error ? `${state}: ${error.code}` : state));
  const turn = () => new Promise((resolve) => setImmediate(resolve));
  const until = async (state) => {
    while (client.state !== state) await turn();
  };
  const to = {
    token: async () => until("token"),
    opening: async () => {
      await to.token();
      await turn();
      asked.at(-1).resolve("a token");
      await until("opening");
    },
    authenticating: async () => {
      await to.opening();
      Socket.all.at(-1).opens();
    },
    ready: async () => {
      await to.authenticating();
      Socket.all.at(-1).says({ op: "OK", corr: "auth" });
    },
    waiting: async () => {
      await to.ready();
      Socket.all.at(-1).breaks();
    },
  };
  return { client, states, asked, to, turn, until, last: () => Socket.all.at(-1) };
}
