// A client of the hub: plain JSON frames over the `ws` package.
import { connect } from "node:net";
import WebSocket from "ws";

/** One connection that is a publisher or a member of a group. */
export async function openHub({ url, token, topic, group, inFlight, ackBatch }) {
  const client = await HubClient.open(url, token);
  return {
    publish: (payload) => client.publish(topic, payload),
    consume: (handle) =>
      client.subscribe(topic, group, { from: "earliest", maxInFlight: inFlight, batchSize: inFlight }, ackBatch, handle),
    settle: () => client.settle(),
    close: () => client.close(),
  };
}

class HubClient {
  #ws;
  #socket;
  #corked = false;
  #calls = new Map(); // corr -> {resolve, reject}
  #calling = 0;
  #subscription;
  #acks = []; // ids that wait for a frame
  #lastAck = Promise.resolve();

  static async open(url, token) {
    const client = new HubClient();
    await client.#connect(url);
    await client.#call({ op: "AUTH", token });
    return client;
  }

  #connect(url) {
    return new Promise((resolve, reject) => {
      this.#ws = new WebSocket(url, {
        perMessageDeflate: false,
        // The socket is ours so that frames can leave together; see #send.
        createConnection: (options) => (this.#socket = connect(options)),
      });
      this.#ws.on("message", (data) => this.#frame(JSON.parse(data)));
      this.#ws.on("open", resolve);
      this.#ws.on("error", (err) => {
        reject(err);
        this.#fail(err);
      });
      this.#ws.on("close", (code) => this.#fail(new Error(`the hub closed the connection: ${code}`)));
    });
  }

  #fail(err) {
    for (const call of this.#calls.values()) call.reject(err);
    this.#calls.clear();
  }

  // `ws` writes each frame on its own, which is a system call each. What is sent in one turn of the
  // event loop leaves with one, the way that Node's documentation of writable.cork advises.
  #send(frame) {
    if (!this.#corked) {
      this.#corked = true;
      this.#socket.cork();
      process.nextTick(() => {
        this.#corked = false;
        this.#socket.uncork();
      });
    }
    this.#ws.send(JSON.stringify(frame));
  }

  /** Resolves with the id of the answer. */
  #call(frame) {
    frame.corr = String(this.#calling++);
    return new Promise((resolve, reject) => {
      this.#calls.set(frame.corr, { resolve, reject });
      this.#send(frame);
    });
  }

  #frame(frame) {
    if (frame.op === "EVENT") {
      this.#event(frame.event);
      return;
    }
    const call = this.#calls.get(frame.corr);
    this.#calls.delete(frame.corr);
    if (frame.op === "OK") call?.resolve(frame.id);
    else call?.reject(new Error(`${frame.code}: ${frame.msg}`));
  }

  publish(topic, payload) {
    return this.#call({ op: "PUBLISH", topic, payload });
  }

  async subscribe(topic, group, opts, ackBatch, handle) {
    this.#subscription = { topic, group, ackBatch, handle };
    await this.#call({ op: "SUBSCRIBE", topic, group, opts });
  }

  // Acks that come together leave together, at most ackBatch with a frame. None waits for an event
  // to come.
  #event(event) {
    this.#subscription.handle(event.payload);
    this.#acks.push(event.id);
    if (this.#acks.length >= this.#subscription.ackBatch) this.#ack();
    else if (this.#acks.length === 1) setImmediate(() => this.#ack());
  }

  #ack() {
    if (this.#acks.length === 0) return;
    const { topic, group } = this.#subscription;
    const ids = this.#acks;
    this.#acks = [];
    this.#lastAck = this.#call({ op: "ACK", topic, group, ids }); // a refusal that nobody waits for ends the process
  }

  /** Resolves when the hub has taken the acks. It answers frames in their order. */
  settle() {
    this.#ack();
    return this.#lastAck;
  }

  close() {
    if (this.#ws.readyState === WebSocket.CLOSED) return undefined;
    return new Promise((resolve) => {
      this.#ws.on("close", resolve);
      this.#ws.close();
    });
  }
}
