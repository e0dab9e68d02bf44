import { EventHubError, type Code } from "./errors.js";
import type { EventRecord } from "./frames.js";
import { Tokens, type TokenSource } from "./token.js";

/** Where the hub's HTTP is. The options of a client may be given here as well. */
export interface HttpHub {
  /** Such as http://127.0.0.1:8081. */
  http: string;
  token?: TokenSource;
  signal?: AbortSignal;
  /** Defaults to that of the platform. */
  fetch?: typeof fetch;
}

export interface ReplayOptions {
  from?: "earliest" | "ts" | "afterId";
  ts?: number;
  afterId?: string;
  key?: string;
  /** NAME:VALUE; only events with these headers. */
  header?: string | string[];
  /** The most events. Defaults to all. */
  limit?: number;
  /** Events for one request. Defaults to 1,000. */
  page?: number;
  /** Is told when retention may have removed events from the beginning of the range. */
  onTruncated?: (first: string | undefined) => void;
}

/**
 * The latest record of a key of a compacted topic, or undefined. It sees every publish that was
 * answered.
 */
export async function latest<T = unknown>(hub: HttpHub, topic: string, key: string): Promise<EventRecord<T> | undefined> {
  const path = `/snap/${encodeURIComponent(topic)}/${key.split("/").map(encodeURIComponent).join("/")}`;
  try {
    return (await get(hub, path, {})) as EventRecord<T>;
  } catch (error) {
    if (error instanceof EventHubError && error.code === "not_found") return undefined;
    throw error;
  }
}

/**
 * The latest records of all keys of a compacted topic. Each key that exists throughout comes once.
 */
export async function* snapshot<T = unknown>(hub: HttpHub, topic: string, { page = 1_000 }: { page?: number } = {}): AsyncGenerator<EventRecord<T>, void, undefined> {
  let next: string | undefined = "";
  while (next !== undefined) {
    const answer = (await get(hub, `/snap/${encodeURIComponent(topic)}`, { next, limit: page })) as { items: EventRecord<T>[]; next?: string };
    yield* answer.items;
    next = answer.next;
  }
}

/** The stored events of a topic, in their order and without a group. */
export async function* replay<T = unknown>(hub: HttpHub, topic: string, opts: ReplayOptions = {}): AsyncGenerator<EventRecord<T>, void, undefined> {
  const { limit = Infinity, page = 1_000, onTruncated, from = "earliest", ts, afterId, ...filter } = opts;
  let start: Record<string, unknown> = { from, ts, afterId };
  for (let left = limit; left > 0; ) {
    const wanted = Math.min(left, page);
    const answer = (await get(hub, "/replay", { topic, ...start, ...filter, limit: wanted })) as { events: EventRecord<T>[]; truncated?: boolean; first?: string };
    if (answer.truncated) onTruncated?.(answer.first);
    yield* answer.events;
    left -= answer.events.length;
    const last = answer.events.at(-1);
    if (!last || answer.events.length < wanted) return;
    start = { from: "afterId", afterId: last.id };
  }
}

async function get(hub: HttpHub, path: string, query: Record<string, unknown>): Promise<unknown> {
  const url = new URL(hub.http.replace(/\/$/, "") + path);
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat()) if (one !== undefined) url.searchParams.append(name, String(one));
  }
  const token = await new Tokens(hub.token).ask();
  const response = await (hub.fetch ?? fetch)(url, {
    headers: token === "" ? {} : { Authorization: `Bearer ${token}` },
    ...(hub.signal ? { signal: hub.signal } : {}),
  });
  if (response.ok) return response.json();
  const { error, code } = (await response.json().catch(() => ({}))) as { error?: string; code?: Code };
  const known = code ?? (response.status === 404 ? "not_found" : "internal");
  throw new EventHubError(known, error ?? `The hub answered ${response.status}.`);
}
