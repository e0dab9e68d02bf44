// What the older clients do, step by step: in Node and in a page, on sockets that take notes.

/** A WebSocket class that keeps what is sent and what comes. */
export function recorder(WebSocket) {
  const sockets = [];
  class Recorded extends WebSocket {
    constructor(...args) {
      super(...args);
      this.sent = [];
      this.got = [];
      this.addEventListener("message", ({ data }) => this.got.push(JSON.parse(data)));
      sockets.push(this);
    }
    send(text) {
      this.sent.push(text);
      super.send(text);
    }
  }
  return { Recorded, sockets };
}

async function until(what, condition) {
  for (const deadline = Date.now() + 30_000; !condition(); ) {
    if (Date.now() > deadline) throw new Error(`not within 30 s: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
}

function equal(what, got, wanted) {
  if (JSON.stringify(got) !== JSON.stringify(wanted)) throw new Error(`${what}: ${JSON.stringify(got)}, not ${JSON.stringify(wanted)}`);
}

/** Waits until every frame of a socket has its answer, and returns the codes of those refused. */
async function answered(socket) {
  const answers = () => socket.got.filter(({ op }) => op !== "EVENT");
  await until("every frame is answered", () => answers().length === socket.sent.length);
  return answers().flatMap(({ code }) => code ?? []);
}

async function codeOf(promise) {
  try {
    await promise;
    return "OK";
  } catch (error) {
    return error.code ?? error.message;
  }
}

const closed = (socket) => until("the connection is closed", () => socket.readyState === 3);

/** The client that connects in its constructor, and waits for answers. */
export async function event(EventClient, { url, token, topic, sockets, rejections }) {
  const done = [];
  const client = new EventClient(url, token);
  const [socket] = sockets;
  await until("the socket is open", () => socket.sent.length === 1);
  equal("AUTH", await answered(socket), []);
  done.push("auth");

  const seen = { ops: [], plain: [] };
  const ops = (event, ctx) => {
    seen.ops.push([event.payload, ctx.attempt]);
    if (seen.ops.length === 1) client.modAck(topic, "ops", event.id, 60_000);
  };
  const plain = async (event, ctx) => {
    seen.plain.push([event.payload, ctx.attempt]);
    if (seen.plain.length === 1) throw new Error("boom");
  };
  equal("SUBSCRIBE", (await client.subscribe(topic, "ops", ops, { from: "earliest", batchSize: 100 })).op, "OK");
  await client.subscribe(topic, "plain", plain);
  done.push("subscribe");
  const heartbeat = { pid: 12345, name: "stt", host: "dev", cpu_pct: 12.3, mem_mb: 256 };
  const { id } = await client.publish(topic, heartbeat, { tags: ["#duck", "#stt"] });
  equal("the id is a UUIDv7", /^[0-9a-f]{8}-[0-9a-f]{4}-7/.test(id), true);
  done.push("publish");
  await until("the event came, and came again to the group that refused it", () => seen.ops.length === 1 && seen.plain.length === 2);
  equal("the first group", seen.ops, [[heartbeat, 1]]);
  equal("the second group", seen.plain, [[heartbeat, 1], [heartbeat, 2]]);
  await client.publish(topic, null);
  await client.publish(topic, undefined);
  await until("two more events", () => seen.ops.length === 3 && seen.plain.length === 4);
  equal("ACK, NACK and MODACK", await answered(socket), []);
  done.push("ack", "nack", "modack");

  equal("a second subscription", await codeOf(client.subscribe(topic, "ops", ops)), "already_subscribed");
  equal("a bad topic", await codeOf(client.publish("a..b", 1)), "bad_topic");
  equal("no subscription", await codeOf(client.unsubscribe(topic, "none")), "not_subscribed");
  client.modAck(topic, "ops", "no such id", 1_000);
  equal("all errors", await answered(socket), ["already_subscribed", "bad_topic", "not_subscribed", "unknown_id"]);
  equal("UNSUBSCRIBE", (await client.unsubscribe(topic, "ops")).op, "OK");
  done.push("unsubscribe");
  socket.close(); // this client has no method for that
  await closed(socket);
  done.push("close");

  // This client leaves the refusal of its token to the process.
  for (const [given, code] of [["wrong", "bad_token"], [undefined, "no_token"]]) {
    const before = rejections.length;
    new EventClient(url, given);
    await until("the token is refused", () => rejections.length > before);
    equal("the refusal", rejections[before].code, code);
    sockets.at(-1).close();
  }
  done.push("errors");
  return done;
}

/** The client that connects at its first call, and waits for nothing but the token. */
export async function prom(PromClient, { url, token, topic, sockets }) {
  const done = [];
  const client = new PromClient(url, token);
  await client.connect();
  done.push("auth");
  const [socket] = sockets;
  const seen = { browser: [], second: [] };
  await client.subscribe(topic, "browser", (event, ctx) => void seen.browser.push([event.payload, ctx.attempt]));
  const second = async (event, ctx) => {
    seen.second.push([event.payload, ctx.attempt]);
    if (seen.second.length === 1) throw new Error("boom");
  };
  await client.subscribe(topic, "second", second, { maxInFlight: 10, ackTimeoutMs: 5_000 });
  equal("SUBSCRIBE", await answered(socket), []);
  done.push("subscribe");
  await client.publish(topic, { x: 1 });
  await until("the event came, and came again to the group that refused it", () => seen.browser.length === 1 && seen.second.length === 2);
  await client.publish(topic, "hi", { headers: { a: "b" }, key: "k", tags: ["t"], caused_by: ["c"], sid: "s", ts: 7 });
  await until("a second event", () => seen.browser.length === 2 && seen.second.length === 3);
  equal("the first group", seen.browser, [[{ x: 1 }, 1], ["hi", 1]]);
  equal("the second group", seen.second, [[{ x: 1 }, 1], [{ x: 1 }, 2], ["hi", 1]]);
  equal("PUBLISH, ACK and NACK", await answered(socket), []);
  done.push("publish", "ack", "nack");

  // Nobody is told of these; the connection goes on.
  await client.publish("a..b", 1);
  await client.subscribe(topic, "browser", () => {});
  await client.unsubscribe(topic, "none");
  equal("errors", await answered(socket), ["bad_topic", "already_subscribed", "not_subscribed"]);
  await client.unsubscribe(topic, "browser");
  equal("UNSUBSCRIBE", (await answered(socket)).length, 3);
  done.push("unsubscribe");
  client.close();
  await closed(socket);
  done.push("close");

  equal("a wrong token", (await codeOf(new PromClient(url, "wrong").connect())).split(":")[0], "bad_token");
  equal("no token", (await codeOf(new PromClient(url).connect())).split(":")[0], "no_token");
  for (const refused of sockets.slice(1)) refused.close();
  equal("no hub", await codeOf(new PromClient("ws://127.0.0.1:1", token).connect()), "ws_error");
  done.push("errors");
  return done;
}
