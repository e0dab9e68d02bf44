// Broadcasts: all events of topics, without groups and acknowledgements. An entry of its own, so that
// pages without broadcasts do not load it.
import type { Client } from "./client.js";
import { EventHubError } from "./errors.js";
import type { CastFrame, ErrFrame, EventRecord, GapFrame, OkFrame, PresenceFrame, SnapshotFrame } from "./frames.js";
import { backoff } from "./publisher.js";
import { ignore, maxRefusals, type Hub, type Member, within } from "./subscription.js";

/** The operations of broadcasts. */
export const broadcastOps = ["GAP", "SNAPSHOT", "PRESENCE"] as const;

/** Which events were left out: missed of them, 0 if nobody can tell, between two places. */
export type Gap = Pick<GapFrame, "from" | "to" | "missed">;

/** How many names are present, and which have come and gone since the last time. */
export type Presence = Pick<PresenceFrame, "count" | "joined" | "left">;

/**
 * A broadcast does not go on where it was. truncated: the topic does not hold those events any more.
 * too_far: there are more of them than the hub reads for a client. stream_changed: the topic was
 * created anew. snapshot: the connection broke within a snapshot, which begins again. gap: a watch
 * left out changes, and takes a new snapshot.
 */
export interface Reset {
  reason: "truncated" | "too_far" | "stream_changed" | "snapshot" | "gap" | (string & {});
  /** Where the broadcast goes on; absent at a snapshot. */
  pos?: string;
}

/** An event of a broadcast. */
export interface Cast<T = unknown> {
  readonly event: EventRecord<T>;
  /** The place of the event, to begin behind it later. An event of a snapshot is no such place. */
  readonly pos: string;
  /** Whether the event is of the snapshot. */
  readonly snapshot: boolean;
  /** Whether the event removes its key. */
  readonly tombstone: boolean;
}

/** Handles events in order, one at a time: the next one waits for a promise that is returned. */
export type CastHandler<T = unknown> = (event: EventRecord<T>, cast: Cast<T>) => unknown;

/** The functions are called in order with the events. history, snapshot and from exclude one another. */
export interface BroadcastOptions {
  /** So many events from before come first, at most 1,000. */
  history?: number;
  /** The newest event of each key comes first. The topic must be compacted. */
  snapshot?: boolean;
  /** Where to begin. Defaults to latest. */
  from?: "latest" | "pos" | "ts" | "afterId";
  pos?: string;
  ts?: number;
  afterId?: string;
  /**
   * What happens when the connection or the handler does not keep up. "skip", the default, leaves
   * out the events up to the newest ones, and tells onGap. "catchup" leaves out nothing, and reads
   * later what does not fit. "close" ends the broadcast with buffer_full.
   */
  slow?: "skip" | "catchup" | "close";
  /** A newer event of a key replaces those that were not handled yet. */
  conflate?: "key";
  /** The least time between two moments in which the hub sends events, at most 60,000. */
  minIntervalMs?: number;
  /**
   * The version of the schema in which events come. By default, they come as they are stored.
   * onGap is told of an event that the hub cannot cast.
   */
  schemaVersion?: number | "latest";
  /** The most events that wait for the handler, besides a snapshot. Defaults to 8,192. */
  queueEvents?: number;
  /**
   * The most events of a snapshot that wait. A larger one ends the broadcast with buffer_full.
   * Defaults to 100,000.
   */
  maxKeys?: number;
  /** Is told which events are left out, in their place. */
  onGap?: (gap: Gap) => unknown;
  onReset?: (reset: Reset) => unknown;
  /** The snapshot has ended: all changes behind pos follow. */
  onSnapshot?: (pos: string) => unknown;
  /** Asks for presence, which the policy must allow, and is told who comes and goes. */
  onPresence?: (presence: Presence) => unknown;
  /** Ends the broadcast when it is aborted. */
  signal?: AbortSignal;
  /** Options of SUBSCRIBE that this version does not know. */
  extra?: Record<string, unknown>;
}

/** What waits for the handler. */
type Item =
  | { kind: "event"; cast: Cast; /** The place before it. */ before: string }
  | { kind: "gap"; gap: Gap }
  | { kind: "reset"; reset: Reset }
  | { kind: "snapshot"; pos: string }
  | { kind: "presence"; presence: Presence };

/** What waits, in order, and within bounds. */
class Queue {
  readonly #items = new Set<Item>();
  readonly #byKey = new Map<string, Item>();
  #presence: Item | undefined;
  /** The one that was added last, if it waits still. */
  #tail: Item | undefined;
  /** Events of a snapshot; all others count as waiting. */
  #snapped = 0;

  constructor(
    readonly events: number,
    readonly keys: number,
    readonly conflate: boolean,
  ) {}

  get #waiting(): number {
    return this.#items.size - this.#snapped;
  }

  /** Adds an event, unless there is no room for it. */
  event(item: Item & { kind: "event" }): boolean {
    const { event, snapshot } = item.cast;
    if (snapshot) {
      if (this.#snapped >= this.keys) return false;
      this.#snapped++;
      this.#push(item);
      return true;
    }
    const key = this.conflate ? event.key : undefined;
    const old = key === undefined ? undefined : this.#byKey.get(key);
    if (old) this.#remove(old);
    if (this.#waiting >= this.events) return false;
    this.#push(item);
    if (key !== undefined) this.#byKey.set(key, item);
    return true;
  }

  /** Adds anything but an event. The newest presence counts, and so does the last of several resets. */
  add(item: Item): void {
    if (item.kind === "presence") {
      if (this.#presence) this.#remove(this.#presence);
      this.#presence = item;
    }
    const last = this.#tail;
    if (last?.kind === "reset" && item.kind === "reset") this.#remove(last);
    if (last?.kind === "gap" && item.kind === "gap") {
      this.#remove(last);
      item = { kind: "gap", gap: sum(last.gap, item.gap) };
    }
    this.#push(item);
    if (this.#waiting > this.events) this.skip();
  }

  /** Puts one gap in the place of all events and gaps besides those of a snapshot. */
  skip(): void {
    let whole: Gap | undefined;
    let reset: Item | undefined;
    for (const item of [...this.#items]) {
      if (item.kind === "reset") {
        if (reset) this.#remove(reset);
        reset = item;
      }
      if (item.kind !== "gap" && (item.kind !== "event" || item.cast.snapshot)) continue;
      const part = item.kind === "gap" ? item.gap : { from: item.before, to: item.cast.pos, missed: 1 };
      whole = whole ? sum(whole, part) : part;
      this.#remove(item);
    }
    if (whole) this.#push({ kind: "gap", gap: whole });
  }

  /** Forgets all but the presence. */
  forget(): void {
    for (const item of [...this.#items]) if (item.kind !== "presence") this.#remove(item);
  }

  clear(): void {
    for (const item of [...this.#items]) this.#remove(item);
  }

  shift(): Item | undefined {
    for (const first of this.#items) {
      this.#remove(first);
      return first;
    }
    return undefined;
  }

  #push(item: Item): void {
    this.#items.add(item);
    this.#tail = item;
  }

  #remove(item: Item): void {
    this.#items.delete(item);
    if (item === this.#presence) this.#presence = undefined;
    if (item === this.#tail) this.#tail = undefined;
    if (item.kind !== "event") return;
    const { event, snapshot } = item.cast;
    if (snapshot) this.#snapped--;
    else if (event.key !== undefined && this.#byKey.get(event.key) === item) this.#byKey.delete(event.key);
  }
}

/** Two gaps as one. */
function sum(a: Gap, b: Gap): Gap {
  return { from: a.from, to: b.to, missed: a.missed && b.missed && a.missed + b.missed };
}

/** A broadcast of a topic to this client. It goes on over reconnects, until it is ended. */
export class Broadcast implements Member {
  /** Resolves when the broadcast has ended, with the error if it did not end by unsubscribe. */
  readonly closed: Promise<EventHubError | undefined>;
  readonly opened: Promise<void>;
  readonly group = undefined;
  readonly #hub: Hub;
  readonly #opts: Record<string, unknown>;
  readonly #queue: Queue;
  /** A new snapshot follows on all that is missed. */
  readonly #fresh: boolean;
  readonly #catchup: boolean;
  readonly #close: boolean;
  readonly #handle: (item: Item) => unknown;
  #closed!: (error?: EventHubError) => void;
  #opened!: (error?: EventHubError) => void;
  /** Counts SUBSCRIBEs. What comes for an earlier one changes nothing. */
  #turn = 0;
  /** The hub has a broadcast for this client, or is to have one. */
  #asked = false;
  /** The hub has accepted the last SUBSCRIBE: what comes is of that. */
  #live = false;
  #ended = false;
  /** Nothing more is handled. */
  #draining = false;
  /** Nothing is asked for until the queue is empty. */
  #held = false;
  #retries = 0;
  #retry: ReturnType<typeof setTimeout> | undefined;
  /** There is no snapshot, or it has ended. */
  #snapped: boolean;
  /** A part of a snapshot has come. */
  #partial = false;
  /** Behind which the broadcast goes on; "" before the first OK. */
  #pos = "";
  /** A handler runs, or is to run. */
  #busy = false;
  /** Resolves when what waited was handled. */
  #idle = Promise.resolve();

  constructor(
    hub: Hub,
    readonly topic: string,
    options: Omit<BroadcastOptions, "onGap" | "onReset" | "onSnapshot" | "onPresence">,
    handle: (item: Item) => unknown,
    presence: boolean,
    fresh: boolean,
  ) {
    const { queueEvents = 8_192, maxKeys = 100_000, signal, extra, ...opts } = options;
    for (const [name, value] of Object.entries({ queueEvents, maxKeys })) {
      if (!(value >= 1)) throw new EventHubError("bad_options", `${name} must be 1 or more`);
    }
    this.#hub = hub;
    this.#handle = handle;
    this.#fresh = fresh;
    this.#catchup = opts.slow === "catchup";
    this.#close = opts.slow === "close";
    this.#snapped = !opts.snapshot;
    this.#opts = { mode: "broadcast", ...(opts.snapshot && { snapshotEnd: true }), ...(presence && { presence }), ...opts, ...extra };
    this.#queue = new Queue(queueEvents, maxKeys, opts.conflate === "key");
    this.closed = new Promise((resolve) => (this.#closed = resolve));
    this.opened = new Promise((resolve, reject) => (this.#opened = (error) => (error ? reject(error) : resolve())));
    this.opened.catch(ignore); // whoever waits for it is told
    if (signal) {
      const abort = (): void => void this.unsubscribe().catch((error: EventHubError) => hub.report(error));
      signal.addEventListener("abort", abort, { once: true });
      void this.closed.then(() => signal.removeEventListener("abort", abort));
    }
    if (hub.ready) this.connected();
  }

  // -- the connection

  /** Subscribes on a connection, in place of an earlier SUBSCRIBE. */
  connected(): void {
    if (this.#ended || this.#draining || this.#held) return;
    this.#leave();
    const turn = this.#turn;
    this.#asked = true;
    this.#call("SUBSCRIBE", this.#resumption(), (error, ok) => this.#began(turn, error, ok));
  }

  disconnected(): void {
    this.#turn++;
    this.#asked = this.#live = false;
    clearTimeout(this.#retry);
  }

  /** Ends what the hub has for this broadcast. What still comes of it is void. */
  #leave(done: (error?: EventHubError) => void = ignore): void {
    const asked = this.#asked && this.#hub.ready;
    this.disconnected();
    if (asked) this.#call("UNSUBSCRIBE", { mode: "broadcast" }, done);
    else done();
  }

  #resumption(): Record<string, unknown> {
    if (!this.#snapped || !this.#pos) return this.#opts;
    const { history, snapshot, snapshotEnd, ts, afterId, ...opts } = this.#opts;
    return { ...opts, from: "pos", pos: this.#pos };
  }

  #call(op: string, opts: unknown, done: (error?: EventHubError, ok?: OkFrame) => void): void {
    this.#hub.call(`"op":"${op}","topic":${JSON.stringify(this.topic)},"opts":${JSON.stringify(opts)}`, done);
  }

  #began(turn: number, error: EventHubError | undefined, ok: OkFrame | undefined): void {
    // The next connection repeats it.
    if (this.#ended || error?.code === "connection_lost" || turn !== this.#turn) return;
    if (error) {
      this.#asked = false;
      if (error.retryable && this.#retries < maxRefusals) {
        this.#retry = setTimeout(() => this.#hub.ready && this.connected(), backoff(this.#retries++));
      } else if (error.code !== "unauthorized") this.end(error);
      return;
    }
    this.#live = true;
    this.#retries = 0;
    this.#opened();
    const { pos = "", recovered, reason = "" } = ok!;
    if (!this.#snapped) {
      if (!this.#partial) return;
      this.#queue.forget(); // what has come of the snapshot before is void
      this.#partial = false;
      this.#add({ kind: "reset", reset: { reason: "snapshot" } });
    } else if (recovered) this.#pos = pos;
    else if (this.#fresh) this.#anew(reason);
    else {
      this.#pos = pos;
      this.#add({ kind: "reset", reset: { reason, pos } });
    }
  }

  /** Asks for a new snapshot, which has the changes that were not handled as well. */
  #anew(reason: string): void {
    this.#snapped = this.#partial = false;
    this.#queue.forget();
    this.#add({ kind: "reset", reset: { reason } });
    this.connected();
  }

  // -- frames

  read(): boolean {
    return false;
  }

  deliver(event: EventRecord, _attempt: unknown, _deadline: unknown, ctx: CastFrame["ctx"]): void {
    if (!this.#live) return;
    const { pos } = ctx;
    const tombstone = ctx.tombstone === true;
    const snapshot = !this.#snapped;
    const item: Item & { kind: "event" } = { kind: "event", cast: { event, pos, snapshot, tombstone }, before: this.#pos };
    if (this.#queue.event(item)) {
      if (snapshot) this.#partial = true;
      else this.#pos = pos;
      this.#work();
    } else if (snapshot) {
      this.fail(`The snapshot of ${this.topic} has more than ${this.#queue.keys} events that wait: raise maxKeys, or handle events faster.`);
    } else if (this.#fresh) this.#anew("gap");
    else if (this.#close) this.fail(`The handler is slower than the events of ${this.topic}: ${this.#queue.events} wait.`);
    else if (this.#catchup) {
      this.#held = true;
      this.#leave();
    } else {
      this.#queue.skip();
      this.#queue.event(item);
      this.#pos = pos;
    }
  }

  frame(frame: GapFrame | SnapshotFrame | PresenceFrame): void {
    if (!this.#live) return;
    if (frame.op === "GAP") {
      const { from, to, missed } = frame;
      this.#pos = to;
      if (this.#fresh) this.#anew("gap");
      else this.#add({ kind: "gap", gap: { from, to, missed } });
    } else if (frame.op === "SNAPSHOT") {
      this.#snapped = true;
      this.#partial = false;
      this.#pos = frame.pos;
      this.#add({ kind: "snapshot", pos: frame.pos });
    } else if (frame.op === "PRESENCE") {
      const { count, joined, left } = frame;
      this.#add({ kind: "presence", presence: { count, joined, left } });
    }
  }

  named(message: string): number {
    return message === this.topic || message.includes(` ${this.topic}; the broadcast`) ? this.topic.length : 0;
  }

  told(frame: ErrFrame): void {
    this.#asked = false;
    this.end(new EventHubError(frame.code, frame.msg, frame.retryable));
  }

  // -- handling

  #add(item: Item): void {
    this.#queue.add(item);
    this.#work();
  }

  #work(): void {
    if (!this.#busy) this.#idle = this.#all();
  }

  /** Handles what waits. Without promises of the handler, it has done so when it returns. */
  async #all(): Promise<void> {
    this.#busy = true;
    while (!this.#ended && !this.#draining) {
      const item = this.#queue.shift();
      if (!item) break;
      try {
        const result = this.#handle(item);
        if (typeof (result as PromiseLike<unknown> | undefined)?.then === "function") await result;
      } catch (cause) {
        this.#hub.report(new EventHubError("handler_failed", `A handler of the broadcast of ${this.topic} failed: ${cause as Error}`, false, { cause }));
      }
    }
    this.#busy = false;
    if (!this.#held) return;
    this.#held = false;
    if (this.#hub.ready) this.connected();
  }

  /** Ends the broadcast with buffer_full. */
  fail(message: string): void {
    this.#leave();
    this.end(new EventHubError("buffer_full", message, false));
  }

  end(error?: EventHubError): void {
    if (this.#ended) return;
    this.disconnected();
    this.#ended = true;
    this.#queue.clear();
    this.#hub.remove(this);
    this.#opened(error ?? new EventHubError("aborted", "The broadcast ended."));
    this.#closed(error);
    if (error) this.#hub.report(error);
  }

  /** Ends the broadcast at once. A handler that runs is not waited for, and is the last one. */
  async unsubscribe(): Promise<void> {
    if (this.#ended) return;
    const left = new Promise<void>((resolve, reject) => {
      this.#leave((error) => {
        if (!error || error.code === "connection_lost" || error.code === "not_subscribed" || error.code === "closed") resolve();
        else reject(error);
      });
    });
    this.end();
    await left;
  }

  /** Ends the broadcast, and lets the handler finish. */
  async drain(timeoutMs = 10_000): Promise<void> {
    if (this.#ended) return;
    this.#draining = true;
    await within(this.#idle, timeoutMs);
    await this.unsubscribe();
  }
}

/**
 * Gives every event of a topic to handler, without a group and without acknowledgements. Resolves
 * when the hub has accepted the broadcast; while there is no connection, it waits. A client has at
 * most one broadcast of a topic.
 *
 * After a reconnect, the broadcast goes on behind the last event that came. onGap or onReset is told
 * what was missed all the same. A broadcast ends when its topic is deleted, or when a new token does
 * not allow it: closed then resolves with the reason. What handlers throw goes to the client's event
 * error, with the code handler_failed.
 */
export async function broadcast<T = unknown>(client: BroadcastClient, topic: string, handler: CastHandler<T>, opts: BroadcastOptions = {}): Promise<Broadcast> {
  const { onGap, onReset, onSnapshot, onPresence, ...own } = opts;
  const handle = (item: Item): unknown => {
    switch (item.kind) {
      case "event":
        return handler(item.cast.event as EventRecord<T>, item.cast as Cast<T>);
      case "gap":
        return onGap?.(item.gap);
      case "reset":
        return onReset?.(item.reset);
      case "snapshot":
        return onSnapshot?.(item.pos);
      case "presence":
        return onPresence?.(item.presence);
    }
  };
  return open(client, topic, own, handle, onPresence !== undefined, false);
}

/** A client of connect or createClient, with types of topics or without. */
export type BroadcastClient = Pick<Client, "state" | "close">;

async function open(client: BroadcastClient, topic: string, opts: BroadcastOptions, handle: (item: Item) => unknown, presence: boolean, fresh: boolean): Promise<Broadcast> {
  const made = (client as Client)["add"](topic, undefined, opts.signal, (hub) => new Broadcast(hub, topic, opts, handle, presence, fresh));
  await made.opened;
  return made;
}

/**
 * Gives the events of a broadcast one after the other, for `for await`. Leaving the loop ends the
 * broadcast. Without onGap, a gap in the events shows in nothing.
 */
export async function* events<T = unknown>(client: BroadcastClient, topic: string, opts: BroadcastOptions = {}): AsyncGenerator<Cast<T>, void, undefined> {
  let next: { cast: Cast<T>; done: () => void } | undefined;
  let wake = (): void => {};
  const made = await broadcast<T>(
    client,
    topic,
    (_, cast) =>
      new Promise<void>((done) => {
        next = { cast, done };
        wake();
      }),
    opts,
  );
  let over = false;
  let failure: EventHubError | undefined;
  void made.closed.then((error) => {
    over = true;
    failure = error;
    wake();
  });
  try {
    for (;;) {
      if (next) {
        const { cast, done } = next;
        next = undefined;
        yield cast;
        done();
      } else if (over) {
        if (failure) throw failure as EventHubError;
        return;
      }
      // What is done may bring the next event in a microtask.
      if (!next && !over) await new Promise<void>((resolve) => (wake = resolve));
    }
  } finally {
    await made.unsubscribe();
    next?.done();
  }
}

/** A key of a watched topic that has a new value, or was removed. */
export interface Change<T = unknown> {
  readonly key: string;
  /**
   * The newest event of the key; absent when the key was found to be gone after changes were missed.
   */
  readonly event: EventRecord<T> | undefined;
  readonly deleted: boolean;
}

export interface WatchOptions {
  /** The most keys that the topic may have. One more ends the watch. Defaults to 100,000. */
  maxKeys?: number;
  /** The least time between two moments in which the hub sends changes, at most 60,000. */
  minIntervalMs?: number;
  /** The handler was given the present state: at the beginning, and after each reset. */
  onCurrent?: () => unknown;
  /** Changes were missed, and the state comes again. */
  onReset?: (reset: Reset) => unknown;
  signal?: AbortSignal;
}

/**
 * Gives the present value of each key of a compacted topic to handler, and then each change, one at
 * a time. Resolves when the hub has accepted it.
 *
 * When changes were missed, after a reconnect or because the handler was slow, the watch takes a new
 * snapshot: the handler is given all values again, and a change with deleted for each key that has
 * gone. If a key changes faster than the handler is, the handler gets the newest value only. For
 * that, a watch keeps all keys; events without a key are left out.
 */
export async function watch<T = unknown>(client: BroadcastClient, topic: string, handler: (change: Change<T>) => unknown, opts: WatchOptions = {}): Promise<Broadcast> {
  const { maxKeys = 100_000, minIntervalMs, onCurrent, onReset, signal } = opts;
  const keys = new Set<string>();
  /** Of the snapshot that comes, after a reset. */
  let fresh: Set<string> | undefined;
  let made: Broadcast | undefined;
  let over = false;
  const gone = async (seen: Set<string>): Promise<void> => {
    for (const key of [...keys]) {
      if (seen.has(key) || over) continue;
      keys.delete(key);
      await handler({ key, event: undefined, deleted: true });
    }
  };
  const handle = (item: Item): unknown => {
    switch (item.kind) {
      case "event": {
        const { event, tombstone } = item.cast as Cast<T>;
        const { key } = event;
        if (key === undefined) return undefined;
        if (tombstone) {
          if (!keys.delete(key)) return undefined;
        } else {
          fresh?.add(key);
          keys.add(key);
          if ((fresh ?? keys).size > maxKeys) return made!.fail(`${topic} has more than ${maxKeys} keys: raise maxKeys.`);
        }
        return handler({ key, event, deleted: tombstone });
      }
      case "reset":
        fresh = new Set();
        return onReset?.(item.reset);
      case "snapshot": {
        const seen = fresh;
        fresh = undefined;
        return seen ? gone(seen).then(() => onCurrent?.()) : onCurrent?.();
      }
      default: // a watch takes a snapshot instead of a gap, and has no presence
        return undefined;
    }
  };
  const own: BroadcastOptions = { snapshot: true, conflate: "key", queueEvents: maxKeys, maxKeys, ...(minIntervalMs !== undefined && { minIntervalMs }), ...(signal && { signal }) };
  const member = (client as Client)["add"](topic, undefined, signal, (hub) => (made = new Broadcast(hub, topic, own, handle, false, true)));
  void member.closed.then(() => (over = true));
  await member.opened;
  return member;
}
