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
  /** The slot of the key, for members of ordered groups. */
  readonly partition?: number;
  readonly payload: T;
}

export interface OkFrame {
  op: "OK";
  corr?: unknown;
  id?: string;
  /** The place behind which a broadcast begins. */
  pos?: string;
  /** Whether it begins where the client asked; reason says why it does not. */
  recovered?: boolean;
  reason?: string;
}

export interface ErrFrame {
  op: "ERR";
  code: string;
  msg: string;
  /** Present when the same request fails again, although the code may mean otherwise. */
  retryable?: false;
  corr?: unknown;
}

export interface EventFrame {
  op: "EVENT";
  topic: string;
  group: string;
  event: EventRecord;
  ctx: { attempt: number; ack_deadline_ms: number };
}

/** An event of a broadcast. */
export interface CastFrame {
  op: "EVENT";
  topic: string;
  group?: undefined;
  event: EventRecord;
  ctx: { pos: string; tombstone?: true; attempt?: undefined; ack_deadline_ms?: undefined };
}

/** Which events a broadcast leaves out; missed is 0 when the hub cannot tell how many. */
export interface GapFrame {
  op: "GAP";
  topic: string;
  from: string;
  to: string;
  missed: number;
  corr?: undefined;
}

/** The snapshot of a broadcast has ended. */
export interface SnapshotFrame {
  op: "SNAPSHOT";
  topic: string;
  pos: string;
  corr?: undefined;
}

/** Who is present at a topic, and who has come and gone since the frame before. */
export interface PresenceFrame {
  op: "PRESENCE";
  topic: string;
  count: number;
  joined: string[];
  left: string[];
  corr?: undefined;
}

export interface AssignFrame {
  op: "ASSIGN";
  topic: string;
  group: string;
  slots: number[];
  epoch: number;
  corr?: undefined;
}

/** What the hub sends. Frames that later extensions add are ignored unless they were asked for. */
export type HubFrame = OkFrame | ErrFrame | EventFrame | CastFrame | AssignFrame | GapFrame | SnapshotFrame | PresenceFrame;

/** The operations that this client understands, besides those of broadcasts. */
export const hubOps = ["OK", "ERR", "ASSIGN", "EVENT"] as const;

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
  /** "key" for an ordered group: of each key, one event at a time is leased, in order. */
  ordered?: "key";
  /** The slots of a new ordered group. Defaults to 64. */
  slots?: number;
  /**
   * The version of the schema in which events come. By default, they come as they are stored. An
   * event that the hub cannot cast is an attempt that failed.
   */
  schemaVersion?: number | "latest";
}
