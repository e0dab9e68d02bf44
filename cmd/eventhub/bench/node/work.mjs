// What both systems do, with the same code around them.

const stallMs = 30_000;

/**
 * Publishes events 0 to n-1: on each connection inFlight lanes, each of which waits for the confirmation of its event
 * before it publishes the next.
 */
export async function publish(connections, { n, size, inFlight }) {
  const payload = newPayload(size);
  let next = 0;
  const lane = async (connection) => {
    for (let seq = next++; seq < n; seq = next++) {
      payload.seq = digits(seq); // it is serialised before publish returns
      await connection.publish(payload);
    }
  };
  const lanes = connections.flatMap((c) => Array.from({ length: inFlight }, () => lane(c)));
  await unlessStalled(Promise.all(lanes), () => next);
}

/** Consumes and acknowledges until each of the events 0 to n-1 has come; resolves when the acks are with the server. */
export async function consume(connections, { n }) {
  const seen = new Uint8Array(n);
  let count = 0;
  const all = new Promise((resolve, reject) => {
    const handle = (payload) => {
      const seq = Number(payload.seq);
      if (!(seq >= 0 && seq < n)) reject(new Error(`event ${payload.seq} came, and ${n} were published`));
      else if (seen[seq]++ === 0 && ++count === n) resolve();
    };
    for (const c of connections) c.consume(handle).catch(reject);
  });
  await unlessStalled(all, () => count);
  await Promise.all(connections.map((c) => c.settle()));
}

/** The payload of the Go side: a heartbeat with a number, brought to its size by a string. */
function newPayload(size) {
  const payload = { seq: digits(0), at: "0".repeat(15), pid: 12345, name: "stt", host: "dev", cpu_pct: 12.3, mem_mb: 256, pad: "" };
  const missing = size - JSON.stringify(payload).length;
  if (missing < 0) throw new Error(`a payload of ${size} bytes is too small: at least ${size - missing}`);
  payload.pad = "x".repeat(missing);
  return payload;
}

const digits = (seq) => String(seq).padStart(10, "0");

/** Waits for work, and fails when its progress stands still. */
async function unlessStalled(work, progress) {
  let timer;
  const stalled = new Promise((_, reject) => {
    let last = -1;
    timer = setInterval(() => {
      const now = progress();
      if (now === last) reject(new Error(`no progress for ${stallMs} ms, after ${now} events`));
      last = now;
    }, stallMs);
  });
  try {
    await Promise.race([work, stalled]);
  } finally {
    clearInterval(timer);
  }
}
