/** An event, as it is stored. */
export interface EventRecord<T = unknown> {
  readonly id: string;
  /** Epoch milliseconds. */
  readonly ts: number;
  readonly topic: string;
  readonly key?: string;
  readonly sid?: string;
  readonly headers?: Readonly<Record<string, string>>;
  readonly caused_by?: readonly string[];
  readonly tags?: readonly string[];
  readonly payload: T;
}

export interface OkFrame {
  op: "OK";
  corr?: unknown;
  id?: string;
}

export interface ErrFrame {
  op: "ERR";
  code: string;
  msg: string;
  corr?: unknown;
}

export interface EventFrame {
  op: "EVENT";
  topic: string;
  group: string;
  event: EventRecord;
  ctx: { attempt: number; ack_deadline_ms: number };
}

/** What the hub sends. Frames that later extensions add are ignored unless they were asked for. */
export type HubFrame = OkFrame | ErrFrame | EventFrame;

/** The operations that this client understands. */
export const hubOps = ["OK", "ERR", "EVENT"] as const;

/** Capabilities that are named in AUTH. */
export const caps = ["group_reset", "events_lost", "retry_after"] as const;

/** Options of PUBLISH. */
export interface PublishOptions {
  /**
   * The event's id. By default the client makes a UUIDv7, so that it can repeat a publish safely.
   */
  id?: string;
  /** Epoch milliseconds; by default when the event is stored. */
  ts?: number;
  key?: string;
  headers?: Record<string, string>;
  tags?: string[];
  caused_by?: string[];
  sid?: string;
  /** Removes the key from the latest records of a compacted topic; needs the payload null. */
  tombstone?: boolean;
  /** Stores the event this many milliseconds later. */
  delay_ms?: number;
  /** Stores the event at this time, in epoch milliseconds. */
  at?: number;
}

/** Options of SUBSCRIBE. */
export interface HubSubscribeOptions {
  /** Where a new group starts. Defaults to latest. */
  from?: "latest" | "earliest" | "ts" | "afterId";
  ts?: number;
  afterId?: string;
  /**
   * The most events that are held at a time. Defaults to 100, or to twice the concurrency if that
   * is given.
   */
  maxInFlight?: number;
  batchSize?: number;
  /** How long a lease lasts. Defaults to 30,000. */
  ackTimeoutMs?: number;
  /** After this many failures an event becomes a dead letter; 0 tries for ever. Defaults to 5. */
  maxAttempts?: number;
  /** Further topics to read through the same subscription. */
  topics?: string[];
  /** A new group disappears when it had no member for this long. */
  groupTtlMs?: number;
}
