import type { EventRecord } from "./frames.js";

/**
 * Returns a function that reads the EVENT frames of one subscription, and returns undefined for any
 * other frame. Half of the time of JSON.parse goes into what all of these frames have in common. So
 * that is compared, and only the payload is parsed. What is compared stands around JSON values and
 * makes the whole frame, so both ways read the same. A frame that differs anywhere, such as one with
 * a key or of a second delivery, is left to JSON.parse.
 */
export function eventReader(topic: string, group: string, leaseMs: number): (text: string) => EventRecord | undefined {
  const name = JSON.stringify(topic);
  const head = `{"op":"EVENT","topic":${name},"group":${JSON.stringify(group)},"event":{"id":"`;
  const middle = `,"topic":${name},"payload":`;
  const tail = `},"ctx":{"attempt":1,"ack_deadline_ms":${leaseMs}}}`;
  return (text) => {
    const end = text.length - tail.length;
    if (!has(text, end, tail) || !has(text, 0, head)) return;
    let at = text.indexOf('"', head.length);
    const id = text.slice(head.length, at);
    if (!has(text, at, '","ts":')) return;
    at += 7;
    let ts = 0;
    for (let digit; (digit = text.charCodeAt(at) - 48) >= 0 && digit <= 9; at++) ts = ts * 10 + digit;
    if (!has(text, at, middle)) return;
    at += middle.length;
    if (id.includes("\\")) return;
    try {
      const payload: unknown = JSON.parse(text.slice(at, end));
      // A part of a text would keep all of it in memory, so this is a copy.
      return { id: ` ${id}`.slice(1), ts, topic, payload };
    } catch {
      return; // the tail belongs to more than the payload
    }
  };
}

const has = (text: string, at: number, part: string): boolean => text.slice(at, at + part.length) === part;
