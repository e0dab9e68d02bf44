import type { Delivery } from "./delivery.js";
import type { EventRecord } from "./frames.js";
import type { Handler } from "./subscription.js";

/** Remembers which events were handled. */
export interface DedupeStore {
  seen(topic: string, group: string, id: string): boolean | Promise<boolean>;
  mark(topic: string, group: string, id: string, ttlMs: number): void | Promise<void>;
}

/** An event may come again for as long as its topic keeps it: seven days by default. */
const week = 7 * 24 * 3600_000;

/**
 * A handler that handles each event once as long as the store remembers: effects happen at most
 * twice, when the process ends between the handler and the mark. A store that shares a transaction
 * with the handler has not even this gap: it marks in the handler, and `mark` does nothing.
 */
export function dedupe<T = unknown>(handler: Handler<T>, store: DedupeStore, ttlMs = week): (event: EventRecord<T>, delivery: Delivery<T>) => Promise<void> {
  return async (event, delivery) => {
    const { topic } = event;
    const { group } = delivery;
    if (await store.seen(topic, group, event.id)) return;
    await handler(event, delivery);
    await store.mark(topic, group, event.id, ttlMs);
  };
}

/** A store in memory, for one process. The oldest entries make room for new ones. */
export function memoryStore(max = 100_000): DedupeStore {
  const ends = new Map<string, number>();
  const keyOf = (...names: string[]): string => JSON.stringify(names);
  return {
    seen: (topic, group, id) => (ends.get(keyOf(topic, group, id)) ?? 0) > Date.now(),
    mark: (topic, group, id, ttlMs) => {
      const key = keyOf(topic, group, id);
      ends.delete(key);
      if (ends.size >= max) ends.delete(ends.keys().next().value!);
      ends.set(key, Date.now() + ttlMs);
    },
  };
}
