import { Delivery } from "./delivery.js";
import { EventHubError } from "./errors.js";
import { eventReader } from "./events.js";
import { backoff } from "./publisher.js";
import type { CastFrame, ErrFrame, EventRecord, GapFrame, HubSubscribeOptions, OkFrame, PresenceFrame, SnapshotFrame } from "./frames.js";

export type Handler<T = unknown> = (event: EventRecord<T>, delivery: Delivery<T>) => unknown;

export interface SubscribeOptions extends HubSubscribeOptions {
  /**
   * "auto", the default, acknowledges when the handler is done, and refuses the event if it throws.
   */
  ack?: "auto" | "manual";
  /** The most handlers that run at a time. Defaults to maxInFlight. */
  concurrency?: number;
  /**
   * For how long the lease of an event is prolonged while its handler runs or is to run. Defaults
   * to 600,000.
   */
  maxLeaseMs?: number;
  /** Unsubscribes when it is aborted. */
  signal?: AbortSignal;
  /** Options of SUBSCRIBE that this version does not know. */
  extra?: Record<string, unknown>;
}

/** What a subscription needs of its client. */
export interface Hub {
  readonly ready: boolean;
  /**
   * Sends a frame; done is called once, with an error if it was refused or the connection ended.
   */
  call(frame: string, done: (error?: EventHubError, ok?: OkFrame) => void): void;
  /** Runs flush soon, with those of other subscriptions. */
  later(flush: () => void): void;
  remove(member: Member): void;
  report(error: EventHubError): void;
}

/** What the frames of a connection are for: a subscription, or a broadcast. */
export interface Member {
  readonly topic: string;
  readonly group: string | undefined;
  connected(): void;
  disconnected(): void;
  end(error?: EventHubError): void;
  drain(timeoutMs: number): Promise<void>;
  /** How many characters of a message name this; 0 if it names something else. */
  named(message: string): number;
  told(frame: ErrFrame): void;
  /** Takes an event from its frame; false if the frame has to be parsed. */
  read(text: string): boolean;
  deliver(event: EventRecord, attempt: number | undefined, ack_deadline_ms: number | undefined, ctx: CastFrame["ctx"]): void;
  frame?(frame: GapFrame | SnapshotFrame | PresenceFrame): void;
}

/** So many SUBSCRIBEs in a row may be refused. */
export const maxRefusals = 30;

/** So many acknowledgements leave without waiting for more. */
const ackBatch = 128;
/** Events that were handled, and whose acknowledgement may not have arrived. */
const maxHandled = 20_000;
const maxReason = 300;

/** A member of a group. It stays one over reconnects, until it is ended. */
export class Subscription<T = any> implements Member {
  /** Resolves when the subscription has ended, with the error if the hub ended it. */
  readonly closed: Promise<EventHubError | undefined>;
  readonly #hub: Hub;
  readonly #handler: Handler<T>;
  readonly #manual: boolean;
  readonly #concurrency: number;
  readonly #maxLeaseMs: number;
  readonly #leaseMs: number;
  readonly #opts: string;
  readonly #names: string;
  readonly #reader: (text: string) => EventRecord | undefined;
  readonly #many: boolean;
  #close!: (error?: EventHubError) => void;
  #opened!: (error?: EventHubError) => void;
  readonly opened: Promise<void>;
  /** Counts connections: a delivery of an earlier one has lost its lease. */
  #connection = 0;
  #ended = false;
  #draining = false;
  #paused = false;
  #retries = 0;
  #retry: ReturnType<typeof setTimeout> | undefined;
  #running = 0;
  /** Wait for a handler. */
  #queue: Delivery<T>[] = [];
  /** Wait, are handled, or wait for the user to settle them. */
  readonly #held = new Map<string, Delivery<T>>();
  #acks: Delivery<T>[] = [];
  #ackCalls = 0;
  /** Handled, but the hub may not know: by key, with the attempt. */
  readonly #handled = new Map<string, number>();
  #keeper: ReturnType<typeof setInterval> | undefined;
  #quiet: (() => void)[] = [];

  constructor(
    hub: Hub,
    readonly topic: string,
    readonly group: string,
    handler: Handler<T>,
    options: SubscribeOptions,
  ) {
    const { ack, concurrency, maxLeaseMs, signal, extra, ...opts } = options;
    if (concurrency !== undefined && !(concurrency > 0 && concurrency % 1 === 0)) {
      throw new EventHubError("bad_options", "concurrency must be 1 or more");
    }
    if (concurrency) opts.maxInFlight ??= Math.min(10_000, Math.max(2 * concurrency, 16));
    this.#hub = hub;
    this.#handler = handler;
    this.#manual = ack === "manual";
    this.#concurrency = concurrency ?? opts.maxInFlight ?? 100;
    this.#maxLeaseMs = maxLeaseMs ?? 600_000;
    this.#leaseMs = opts.ackTimeoutMs ?? 30_000;
    this.#opts = JSON.stringify({ ...opts, ...extra });
    this.#names = `"topic":${JSON.stringify(topic)},"group":${JSON.stringify(group)}`;
    this.#reader = eventReader(topic, group, this.#leaseMs);
    this.#many = !!opts.topics?.length;
    this.closed = new Promise((resolve) => (this.#close = resolve));
    this.opened = new Promise((resolve, reject) => (this.#opened = (error) => (error ? reject(error) : resolve())));
    this.opened.catch(() => {}); // whoever waits for it is told
    if (signal) {
      const abort = (): void => void this.unsubscribe().catch((error: EventHubError) => hub.report(error));
      signal.addEventListener("abort", abort, { once: true });
      void this.closed.then(() => signal.removeEventListener("abort", abort));
    }
    if (hub.ready) this.connected();
  }

  // -- the connection

  /** Subscribes on a new connection. */
  connected(): void {
    if (this.#ended) return;
    const connection = this.#connection;
    this.#call("SUBSCRIBE", `,"opts":${this.#opts}`, (error) => {
      // The next connection repeats it.
      if (this.#ended || error?.code === "connection_lost" || connection !== this.#connection) return;
      if (!error) {
        this.#retries = 0;
        this.#opened();
      } else if (error.retryable && this.#retries < maxRefusals) {
        this.#retry = setTimeout(() => this.#hub.ready && this.connected(), backoff(this.#retries++));
      } else if (error.code !== "unauthorized") this.end(error);
    });
    if (this.#paused || this.#draining) this.#call("PAUSE", "", ignore);
  }

  /** The connection has ended, and all leases with it. */
  disconnected(): void {
    this.#connection++;
    clearTimeout(this.#retry);
    for (const d of this.#acks) this.#remember(d);
    this.#acks = [];
    for (const d of this.#queue) this.#held.delete(this.#key(d.event));
    this.#queue = [];
    for (const [key, d] of this.#held) {
      d.lose();
      if (d.again) d.again = undefined;
      if (this.#manual && d.until === 0) this.#held.delete(key); // its handler is done
    }
    this.#keep();
    this.#tellQuiet();
  }

  /** Ends the subscription in this client. */
  end(error?: EventHubError): void {
    if (this.#ended) return;
    this.disconnected();
    this.#ended = true;
    this.#held.clear(); // handlers that run go on, and settle nothing
    this.#keep();
    this.#hub.remove(this);
    this.#opened(error ?? new EventHubError("aborted", "The subscription ended."));
    this.#close(error);
    this.#tellQuiet();
    if (error) this.#hub.report(error);
  }

  #call(op: string, rest: string, done: (error?: EventHubError) => void): void {
    this.#hub.call(`"op":"${op}",${this.#names}${rest}`, done);
  }

  // -- deliveries

  #key(event: EventRecord): string {
    return this.#many ? `${event.topic}/${event.id}` : event.id;
  }

  read(text: string): boolean {
    const event = this.#reader(text);
    if (event) this.deliver(event, 1, this.#leaseMs);
    return event !== undefined;
  }

  deliver(event: EventRecord, attempt: number, ack_deadline_ms: number): void {
    if (this.#draining || this.#ended) return; // UNSUBSCRIBE gives the event back
    const d = new Delivery<T>(this, event as EventRecord<T>, attempt, ack_deadline_ms);
    if (this.#held.size > 0 || this.#handled.size > 0) {
      const key = this.#key(d.event);
      const held = this.#held.get(key);
      if (held && held.until === 0) {
        held.lose(); // its handler is done, and nobody settled it in time
        this.#held.delete(key);
      } else if (held) {
        // Its handler still runs, and is not started beside itself: what becomes of it settles this
        // delivery, too.
        held.again = d;
        return;
      }
      const handled = this.#handled.get(key);
      if (handled !== undefined) {
        this.#handled.delete(key);
        if (d.attempt > handled) {
          this.#ackNow(d); // the acknowledgement was lost with its connection
          return;
        }
      }
    }
    if (this.#paused || this.#running >= this.#concurrency || this.#queue.length > 0) {
      this.#queue.push(d);
      this.#hold(d);
    } else this.#run(d);
  }

  #run(d: Delivery<T>): void {
    let result: unknown;
    try {
      result = this.#handler(d.event, d);
    } catch (error) {
      this.#finished(d, error, true);
      return;
    }
    if (typeof (result as PromiseLike<unknown> | undefined)?.then !== "function") {
      this.#finished(d, undefined, false);
      return;
    }
    this.#running++;
    this.#hold(d);
    const done = (error: unknown, failed: boolean): void => {
      this.#running--;
      this.#finished(d, error, failed);
      this.#next();
      this.#tellQuiet();
    };
    // Whatever the thenable does, this settles once.
    Promise.resolve(result).then(
      () => done(undefined, false),
      (error: unknown) => done(error, true),
    );
  }

  #next(): void {
    while (!this.#paused && this.#queue.length > 0 && this.#running < this.#concurrency) this.#run(this.#queue.shift()!);
  }

  #finished(d: Delivery<T>, error: unknown, failed: boolean): void {
    d.until = 0; // the lease is prolonged no more
    if (d.settled) {
      this.#letGo(d);
      return;
    }
    if (failed) this.nack(d, reasonOf(error), undefined);
    else if (!this.#manual) this.ack(d);
    else if (d.lost || this.#ended) this.#letGo(d);
    else this.#held.set(this.#key(d.event), d); // until the user settles it
  }

  /** A delivery is held while its handler is to run or runs. */
  #hold(d: Delivery<T>): void {
    const now = performance.now();
    d.due = now + d.ack_deadline_ms / 2;
    d.until = now + this.#maxLeaseMs;
    this.#held.set(this.#key(d.event), d);
    this.#keep();
  }

  /** Forgets a delivery that is over. What came meanwhile shares its fate. */
  #letGo(d: Delivery<T>): void {
    if (this.#held.size === 0) return;
    const key = this.#key(d.event);
    if (this.#held.get(key) !== d) return;
    this.#held.delete(key);
    this.#keep();
    this.#tellQuiet();
  }

  #keep(): void {
    if (this.#held.size > 0) this.#keeper ??= setInterval(() => this.#prolong(), Math.max(100, Math.min(5_000, this.#leaseMs / 5)));
    else if (this.#keeper) {
      clearInterval(this.#keeper);
      this.#keeper = undefined;
    }
  }

  #prolong(): void {
    const now = performance.now();
    for (const held of this.#held.values()) {
      const d = held.lost ? held.again : held; // the lease that counts
      if (!d || now >= held.until || now < held.due) continue;
      held.due = now + this.#leaseMs / 2;
      this.#extend(d, this.#leaseMs, held);
    }
  }

  #extend(d: Delivery<T>, ms: number, held: Delivery<T>): void {
    this.#call("MODACK", `,"id":${JSON.stringify(d.event.id)},"extend_ms":${ms}`, (error) => {
      if (error?.code !== "unknown_id" || d.settled) return;
      d.lose();
      if (d !== held) held.again = undefined;
    });
  }

  // -- settling

  ack(d: Delivery<T>): boolean {
    if (d.settled) return false;
    d.settled = true;
    const { again } = d;
    this.#letGo(d);
    if (!d.lost) this.#ackNow(d);
    else if (again) this.#ackNow(again);
    else if (!this.#ended) this.#remember(d); // it comes again, and is acknowledged then
    return !d.lost || again !== undefined;
  }

  nack(d: Delivery<T>, reason: string, delayMs: number | undefined): boolean {
    if (d.settled) return false;
    d.settled = true;
    const current = d.lost ? d.again : d;
    this.#letGo(d);
    if (!current) return false;
    current.settled = true;
    const ms = milliseconds(delayMs);
    const delay = ms === undefined ? "" : `,"delay_ms":${ms}`;
    this.#call("NACK", `,"id":${JSON.stringify(d.event.id)},"reason":${JSON.stringify(reason.slice(0, maxReason))}${delay}`, ignore);
    return true;
  }

  extend(d: Delivery<T>, ms: number): boolean {
    if (d.settled || d.lost) return false;
    ms = milliseconds(ms) ?? 0; // 0 stands for the usual lease
    d.due = performance.now() + (ms || this.#leaseMs) / 2;
    this.#extend(d, ms, d);
    return true;
  }

  /** Prolongs a lease by the id of the event. */
  extendId(id: string, ms: number): void {
    this.#call("MODACK", `,"id":${JSON.stringify(id)},"extend_ms":${milliseconds(ms) ?? 0}`, ignore);
  }

  #ackNow(d: Delivery<T>): void {
    d.settled = true;
    const waiting = this.#acks.push(d);
    if (waiting >= ackBatch) this.#flush();
    else if (waiting === 1) this.#hub.later(this.#flush);
  }

  readonly #flush = (): void => {
    const acks = this.#acks;
    if (acks.length === 0) return;
    this.#acks = [];
    const ids = acks.length === 1 ? `,"id":${JSON.stringify(acks[0]!.event.id)}` : `,"ids":${JSON.stringify(acks.map((d) => d.event.id))}`;
    this.#ackCalls++;
    this.#call("ACK", ids, (error) => {
      this.#ackCalls--;
      if (error && !this.#ended) for (const d of acks) this.#remember(d);
      this.#tellQuiet();
    });
  };

  /** The event was handled, and may come again because the hub does not know. */
  #remember(d: Delivery<T>): void {
    if (this.#handled.size >= maxHandled) this.#handled.delete(this.#handled.keys().next().value!);
    this.#handled.set(this.#key(d.event), d.attempt);
  }

  // -- for the user

  /** How many handlers run, or are to run. */
  get active(): number {
    return this.#running + this.#queue.length;
  }

  /** Stops deliveries to this member until resume. Handlers that run go on. */
  pause(): Promise<void> {
    this.#paused = true;
    return this.#ask("PAUSE");
  }

  /** Starts deliveries again. */
  resume(): Promise<void> {
    this.#paused = false;
    this.#next();
    return this.#ask("RESUME");
  }

  /** Leaves the group at once. Events that are not settled go to other members. */
  async unsubscribe(): Promise<void> {
    if (this.#ended) return;
    this.#draining = true;
    this.#flush();
    const left = this.#ask("UNSUBSCRIBE");
    this.end();
    await left;
  }

  /** Takes no more events, lets the handlers finish, and leaves the group. */
  async drain(timeoutMs = 10_000): Promise<void> {
    if (this.#ended) return;
    this.#draining = true;
    for (const d of this.#queue) this.#held.delete(this.#key(d.event));
    this.#queue = [];
    this.#ask("PAUSE").catch(ignore);
    await within(this.#settled(), timeoutMs);
    await this.unsubscribe();
  }

  #settled(): Promise<void> {
    return new Promise((resolve) => {
      this.#quiet.push(resolve);
      this.#flush();
      this.#tellQuiet();
    });
  }

  #tellQuiet(): void {
    if (this.#quiet.length === 0 || this.#held.size > 0 || this.#ackCalls > 0 || this.#acks.length > 0) return;
    for (const f of this.#quiet) f();
    this.#quiet = [];
  }

  /** A frame whose effect a new connection has anyway. */
  #ask(op: string): Promise<void> {
    if (!this.#hub.ready || this.#ended) return Promise.resolve();
    return new Promise((resolve, reject) => {
      this.#call(op, "", (error) => {
        if (!error || error.code === "connection_lost" || error.code === "not_subscribed" || error.code === "closed") resolve();
        else reject(error);
      });
    });
  }

  named(message: string): number {
    const name = `${this.topic}::${this.group}`;
    return message.includes(name) ? name.length : 0;
  }

  /** An error about this subscription that answers no frame. */
  told(frame: ErrFrame): void {
    this.end(new EventHubError(frame.code, frame.msg, frame.retryable));
  }
}

/** Waits for work, and no longer than that. */
export async function within(work: Promise<unknown>, ms: number): Promise<void> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  await Promise.race([work, new Promise((resolve) => (timer = setTimeout(resolve, ms)))]);
  clearTimeout(timer);
}

export function ignore(): void {}

/** A time as the hub takes it: whole, and at most twelve hours. */
function milliseconds(ms: number | undefined): number | undefined {
  return ms! >= 0 ? Math.min(Math.ceil(ms!), 43_200_000) : undefined;
}

function reasonOf(error: unknown): string {
  try {
    return `${(error as Error | undefined)?.message ?? error}`;
  } catch {
    return ""; // an object without a form as text
  }
}
