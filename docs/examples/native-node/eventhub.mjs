// How events of a hub are stored in NATS, for programs that speak NATS themselves. The rules are
// those of docs/native.md. Copy this file.
import { createHash } from "node:crypto";

const bytes = (text) => Buffer.from(text, "utf8");
const hash = (text) => createHash("sha256").update(text).digest("hex").slice(0, 32);
const hex = (byte) => byte.toString(16).toUpperCase().padStart(2, "0");

/** Writes text with the bytes that plain does not match as =XX. */
const escape = (text, plain, mark = "=") =>
  Array.from(bytes(text), (b) => (plain.test(String.fromCharCode(b)) ? String.fromCharCode(b) : mark + hex(b))).join("");

/** Reports whether text is a topic. */
export const isTopic = (text) =>
  /^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$/.test(text) && text.length <= (text.startsWith("dlq.") ? 255 : 251);

/** Writes a key as one token of a subject, which is also its key in the bucket of the topic. */
export const keyToken = (key) => escape(key, /[A-Za-z0-9_-]/);

/** Reads a token back. An = that begins no escape stands for itself. */
export function parseKeyToken(token) {
  const raw = bytes(token).toString("latin1");
  return Buffer.from(raw.replace(/=([0-9A-F]{2})/g, (_, xx) => String.fromCharCode(parseInt(xx, 16))), "latin1").toString("utf8");
}

/** The subject of the events of a topic, with or without a key. */
export const subject = (topic, key = "") => (key === "" ? `event.${topic}` : `keyed.${keyToken(key)}.${topic}`);

/** The topic and the key of a subject; undefined when no event has the subject. */
export function parseSubject(text) {
  const [kind, ...rest] = text.split(".");
  if (kind === "event") return { topic: rest.join("."), key: "" };
  if (kind !== "keyed" || rest.length < 2) return undefined;
  return { topic: rest.slice(1).join("."), key: parseKeyToken(rest[0]) };
}

/** The name of the stream of a topic that has one of its own, and of a consumer. */
function objectName(text) {
  const name = escape(text, /[a-z0-9_-]/);
  return name.length <= 200 ? name : name.slice(0, 120) + "=_" + hash(text);
}

export const streamName = (topic) => objectName(topic);

/** The first consumer of a group. family: the stream holds other topics too. */
export const consumerName = (topic, group, family = false) => objectName(family ? `${group}@${topic}` : group);

/** The KV bucket of a compacted topic. */
export function bucketName(topic) {
  const name = "latest_" + escape(topic, /[a-z0-9.-]/, "X").replaceAll(".", "_");
  return name.length <= 150 ? name : name.slice(0, 100) + "XX" + hash(topic);
}

const reserved = /^(nats|event|kv)-/i;

/** The record of a message that a consumer has delivered, as clients of a hub see it. */
export function decode(message) {
  const { topic, key } = parseSubject(message.subject);
  const get = (name) => message.headers?.get(name) ?? "";
  const { stream, streamSequence, timestampNanos } = message.info;
  const list = (name) => (get(name) === "" ? undefined : JSON.parse(get(name)));
  const record = {
    id: get("Event-Id") || get("Nats-Msg-Id") || `${stream}@${streamSequence}`,
    ts: get("Event-Ts") === "" ? Math.floor(timestampNanos / 1e6) : Number(get("Event-Ts")),
    topic,
    key: key || undefined,
    sid: get("Event-Sid") || undefined,
    tags: list("Event-Tags"),
    caused_by: list("Event-Caused-By"),
    payload: null,
  };
  const headers = {};
  for (const [name, values] of message.headers ?? []) if (!reserved.test(name)) headers[name] = values.join(", ");
  if (message.data.length > 0) {
    try {
      record.payload = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(message.data));
    } catch {
      const text = Buffer.from(message.data);
      const isText = Buffer.from(text.toString("utf8"), "utf8").equals(text);
      headers["Event-Encoding"] = isText ? "text" : "base64";
      record.payload = text.toString(isText ? "utf8" : "base64");
    }
  }
  if (Object.keys(headers).length > 0) record.headers = headers;
  return record;
}
