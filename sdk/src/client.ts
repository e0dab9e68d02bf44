import { Connection, type ConnectionOptions } from "./connection.js";
import type { Delivery } from "./delivery.js";
import { aborted, EventHubError } from "./errors.js";
import { caps } from "./frames.js";
import type { AssignFrame, CastFrame, ErrFrame, HubFrame, OkFrame, PublishOptions } from "./frames.js";
import type { State } from "./machine.js";
import { Publisher, type PublisherOptions } from "./publisher.js";
import { checked, type StandardSchema } from "./schema.js";
import { Subscription, type Handler, type Hub, type Member, type SubscribeOptions, within } from "./subscription.js";

export interface ClientOptions extends Omit<ConnectionOptions, "url">, PublisherOptions {
  /**
   * Schemas of payloads, by topic. Publishes are checked before they are sent, and events before
   * they are handled.
   */
  schemas?: Record<string, StandardSchema>;
}

export interface ConnectOptions extends ClientOptions {
  /** How long `connect` waits for the first connection. Defaults to 30,000. */
  connectTimeoutMs?: number;
  signal?: AbortSignal;
}

/** What the hub tells about a group without being asked. */
export interface Notice {
  code: "group_reset" | "events_lost";
  topic: string;
  group: string;
  message: string;
}

export interface ClientEvents {
  /** The state of the connection has changed; error says why, if it was lost. */
  state: (state: State, error: EventHubError | undefined) => void;
  /** A group had to start anew, or events were removed before it was given them. */
  notice: (notice: Notice) => void;
  /**
   * The slots of a member of an ordered group have changed: before the first event of a new slot,
   * and after the last lease of a lost one. This also comes after a reconnect.
   */
  assign: (assignment: AssignFrame) => void;
  /** Something failed that no call reports, such as a subscription that the hub has ended. */
  error: (error: EventHubError) => void;
}

export interface PublishManyOptions {
  /** The most publishes without an answer. Defaults to 256. */
  inFlight?: number;
  signal?: AbortSignal;
}

/** An event for publishMany. */
export interface Outgoing<T = unknown> extends PublishOptions {
  payload: T;
}

/** One topic's payloads. */
export type Topics = Record<string, unknown>;

/** A client whose topics have types. */
export interface TypedClient<M extends Topics> extends Omit<Client, "publish" | "publishMany" | "subscribe" | "events"> {
  publish<K extends keyof M & string>(topic: K, payload: M[K], opts?: PublishOptions & { signal?: AbortSignal }): Promise<string>;
  publishMany<K extends keyof M & string>(topic: K, events: Iterable<Outgoing<M[K]>> | AsyncIterable<Outgoing<M[K]>>, opts?: PublishManyOptions): Promise<string[]>;
  subscribe<K extends keyof M & string>(topic: K, group: string, handler: Handler<M[K]>, opts?: SubscribeOptions): Promise<Subscription<M[K]>>;
  events<K extends keyof M & string>(topic: K, group: string, opts?: Omit<SubscribeOptions, "ack">): AsyncGenerator<Delivery<M[K]>, void, undefined>;
}

/**
 * A client, which connects at once. It holds one connection, and makes another when that breaks.
 */
export class Client {
  readonly #connection: Connection;
  readonly #publisher: Publisher;
  readonly #hub: Hub;
  readonly #schemas: Record<string, StandardSchema> | undefined;
  /** By topic, then by group; a broadcast has none. */
  readonly #members = new Map<string, Map<string | undefined, Member>>();
  /** Had the event that was parsed last, and probably has the next one. */
  #recent: Member | undefined;
  readonly #calls = new Map<number, { done: (error?: EventHubError, ok?: OkFrame) => void; sent: number }>();
  readonly #listeners: { [E in keyof ClientEvents]: Set<ClientEvents[E]> } = { state: new Set(), notice: new Set(), assign: new Set(), error: new Set() };
  #corr = 0;
  #over: EventHubError | undefined;
  #closing: Promise<void> | undefined;
  readonly #waiting = new Set<(error?: EventHubError) => void>();

  constructor(url: string, options: ClientOptions = {}) {
    const set = defined(options);
    this.#schemas = set.schemas;
    this.#connection = new Connection({ ...set, url }, {
      resume: () => this.#resume(),
      suspend: () => this.#suspend(),
      ended: (error) => this.#ended(error),
      changed: (state, error) => this.#emit("state", state, error),
      event: (text) => this.#recent?.read(text) ?? false,
      frame: (frame) => this.#frame(frame),
      unanswered: () => this.#unanswered(),
    });
    const send = (text: string): void => this.#connection.send(text);
    this.#publisher = new Publisher(set, send, () => this.#corr++);
    const flushes = newBatch();
    const client = this;
    this.#hub = {
      get ready() {
        return client.#connection.state === "ready";
      },
      call: (frame, done) => this.#call(frame, done),
      later: flushes,
      remove: (member) => this.#remove(member),
      report: (error) => this.#emit("error", error),
    };
    this.#connection.start();
  }

  /** The state of the connection. */
  get state(): State {
    return this.#connection.state;
  }

  /** How many publishes have no answer yet. */
  get pending(): number {
    return this.#publisher.pending;
  }

  /** Calls a function at each event, until the function that is returned is called. */
  on<E extends keyof ClientEvents>(event: E, listener: ClientEvents[E]): () => void {
    this.#listeners[event].add(listener);
    return () => void this.#listeners[event].delete(listener);
  }

  /** Resolves when the client is connected; rejects when it has given up or is closed. */
  ready(signal?: AbortSignal): Promise<void> {
    return new Promise((resolve, reject) => {
      if (this.state === "ready") return resolve();
      if (this.#over) return reject(this.#over);
      if (signal?.aborted) return reject(aborted(signal));
      const done = (error?: EventHubError): void => {
        this.#waiting.delete(done);
        signal?.removeEventListener("abort", abort);
        if (error) reject(error);
        else resolve();
      };
      const abort = (): void => done(aborted(signal!));
      this.#waiting.add(done);
      signal?.addEventListener("abort", abort);
    });
  }

  /**
   * Publishes an event, and resolves with its id when the hub has stored it. While there is no
   * connection, the event waits. After a break, an event without an answer is sent again under the
   * same id; where that could store it twice, the promise is rejected with outcome_unknown.
   */
  publish<T = unknown>(topic: string, payload: T, opts?: PublishOptions & { signal?: AbortSignal }): Promise<string> {
    let options: PublishOptions | undefined = opts;
    let signal: AbortSignal | undefined;
    if (opts?.signal) ({ signal, ...options } = opts);
    const schema = this.#schemas?.[topic];
    if (!schema) return this.#publisher.publish(topic, payload, options, signal);
    return new Promise((resolve) => resolve(checked(schema, payload, (value) => this.#publisher.publish(topic, value, options, signal))));
  }

  /**
   * Publishes many events, several at a time, and resolves with their ids. The source is asked for
   * an event only when there is room for it. After the first failure, no further event is taken;
   * the promise is rejected when those on their way have their answers.
   */
  async publishMany<T = unknown>(topic: string, events: Iterable<Outgoing<T>> | AsyncIterable<Outgoing<T>>, opts: PublishManyOptions = {}): Promise<string[]> {
    const { inFlight = 256, signal } = opts;
    const source = (async function* () {
      yield* events;
    })();
    const ids: string[] = [];
    let flying = 0;
    let failure: { error: unknown } | undefined;
    let wake = (): void => {};
    const change = (): Promise<void> => new Promise((resolve) => (wake = resolve));
    const fail = (error: unknown): void => {
      failure ??= { error };
      wake();
    };
    for (let index = 0; ; ) {
      let next: IteratorResult<Outgoing<T>> | undefined;
      source.next().then((result) => {
        next = result;
        wake();
      }, fail);
      // A source may wait for long, and a failure is reported at once.
      while (!next && !failure) await change();
      if (failure || next!.done) break;
      const { payload, ...options } = next!.value;
      const at = index++;
      flying++;
      this.publish(topic, payload, signal ? { ...options, signal } : options)
        .then((id) => void (ids[at] = id), fail)
        .finally(() => {
          flying--;
          wake();
        });
      while (flying >= inFlight && !failure) await change();
    }
    // What the source says to that is of no interest any more.
    if (failure) source.return().catch(() => {});
    while (flying > 0) await change();
    if (failure) throw (failure as { error: unknown }).error;
    return ids;
  }

  /**
   * Joins a group, and stays a member over reconnects. The handler's end acknowledges the event,
   * and what it throws refuses the event. Resolves when the hub has accepted the subscription.
   */
  async subscribe<T = unknown>(topic: string, group: string, handler: Handler<T>, opts: SubscribeOptions = {}): Promise<Subscription<T>> {
    const subscription = this.join(topic, group, handler, opts);
    await subscription.opened;
    return subscription;
  }

  /** Joins without waiting for the hub. The older clients of compat.ts need that, too. */
  private join<T>(topic: string, group: string, handler: Handler<T>, opts: SubscribeOptions): Subscription<T> {
    return this.add(topic, group, opts.signal, (hub) => new Subscription<T>(hub, topic, group, this.#guard(topic, handler), opts));
  }

  /** Adds a subscription or a broadcast. */
  private add<M extends Member>(topic: string, group: string | undefined, signal: AbortSignal | undefined, make: (hub: Hub) => M): M {
    if (this.#over) throw this.#over;
    if (this.#closing) throw new EventHubError("closed", "The client is closed.");
    if (signal?.aborted) throw aborted(signal);
    const groups = this.#members.get(topic) ?? new Map<string | undefined, Member>();
    if (groups.has(group)) throw new EventHubError("already_subscribed", `${topic}::${group}`);
    const member = make(this.#hub);
    this.#members.set(topic, groups.set(group, member));
    return member;
  }

  /** Checks payloads before the handler, if their topic has a schema. */
  #guard<T>(topic: string, handler: Handler<T>): Handler<T> {
    const schema = this.#schemas?.[topic];
    if (!schema) return handler;
    return (event, delivery) =>
      checked(schema, event.payload, (payload) => {
        (event as { payload: unknown }).payload = payload;
        return handler(event, delivery);
      });
  }

  /**
   * Joins a group and gives its events one after the other. To ask for the next event acknowledges
   * the one before. Leaving the loop leaves the group, and gives back the event at hand unless it
   * was acknowledged.
   */
  async *events<T = unknown>(topic: string, group: string, opts: Omit<SubscribeOptions, "ack"> = {}): AsyncGenerator<Delivery<T>, void, undefined> {
    let wake = (): void => {};
    const come: { delivery: Delivery<T>; done: () => void }[] = [];
    const subscription = this.join<T>(
      topic,
      group,
      (_, delivery) =>
        new Promise<void>((done) => {
          come.push({ delivery, done });
          wake();
        }),
      { concurrency: 1, ...opts },
    );
    let over = false;
    let failure: EventHubError | undefined;
    void subscription.closed.then((error) => {
      over = true;
      failure = error;
      wake();
    });
    try {
      for (;;) {
        const next = come.shift();
        if (next) {
          yield next.delivery;
          next.done();
        } else if (over) {
          if (failure) throw failure;
          return;
        }
        // What is done may bring the next event in a microtask.
        if (come.length === 0 && !over) await new Promise<void>((resolve) => (wake = resolve));
      }
    } finally {
      await subscription.unsubscribe();
      for (const { done } of come) done();
    }
  }

  /**
   * Lets handlers and publishes finish, and closes the connection. Events that no handler has begun
   * go to other members. What has not finished in time is given up.
   */
  close({ timeoutMs = 10_000 }: { timeoutMs?: number } = {}): Promise<void> {
    return (this.#closing ??= this.#drain(timeoutMs));
  }

  async #drain(timeoutMs: number): Promise<void> {
    const drained = Promise.allSettled(this.#all().map((s) => s.drain(timeoutMs))).then(() => this.#publisher.idle());
    await within(drained, timeoutMs);
    this.#connection.close();
  }

  // -- the connection

  #all(): Member[] {
    return [...this.#members.values()].flatMap((groups) => [...groups.values()]);
  }

  #resume(): void {
    for (const member of this.#all()) member.connected();
    this.#publisher.resume();
    this.#tell();
  }

  #suspend(): void {
    for (const member of this.#all()) member.disconnected();
    this.#publisher.suspend();
    this.#failCalls(new EventHubError("connection_lost", "The connection ended."));
  }

  #ended(error: EventHubError): void {
    this.#over = error;
    for (const member of this.#all()) member.end(error.code === "closed" ? undefined : error);
    this.#publisher.end(error);
    this.#failCalls(error);
    this.#tell(error);
    if (error.code !== "closed") this.#emit("error", error);
  }

  #tell(error?: EventHubError): void {
    for (const done of [...this.#waiting]) done(error);
  }

  #failCalls(error: EventHubError): void {
    const calls = [...this.#calls.values()];
    this.#calls.clear();
    for (const { done } of calls) done(error);
  }

  #call(frame: string, done: (error?: EventHubError, ok?: OkFrame) => void): void {
    if (this.state !== "ready") {
      done(new EventHubError("connection_lost", "The connection ended."));
      return;
    }
    const corr = this.#corr++;
    this.#calls.set(corr, { done, sent: performance.now() });
    this.#connection.send(`{${frame},"corr":${corr}}`);
  }

  #unanswered(): number {
    for (const { sent } of this.#calls.values()) return Math.max(performance.now() - sent, this.#publisher.unanswered());
    return this.#publisher.unanswered();
  }

  // -- frames

  #frame(frame: HubFrame): void {
    if (frame.op === "EVENT") {
      const { ctx } = frame;
      this.#recent = this.#members.get(frame.topic)?.get(frame.group);
      this.#recent?.deliver(frame.event, ctx.attempt, ctx.ack_deadline_ms, ctx as CastFrame["ctx"]);
      return;
    }
    const { corr } = frame;
    if (frame.op === "OK") {
      if (typeof corr !== "number" || this.#publisher.ok(corr, frame.id)) return;
      const call = this.#calls.get(corr);
      this.#calls.delete(corr);
      call?.done(undefined, frame);
    } else if (frame.op === "ERR") {
      if (typeof corr !== "number") this.#told(frame);
      else if (!this.#publisher.err(corr, frame)) {
        const call = this.#calls.get(corr);
        this.#calls.delete(corr);
        call?.done(new EventHubError(frame.code, frame.msg, frame.retryable));
      }
    } else if (frame.op === "ASSIGN") this.#emit("assign", frame);
    // Of a broadcast, or of an extension that this client did not ask for.
    else this.#members.get(frame.topic)?.get(undefined)?.frame!(frame);
  }

  /** An error that answers no frame. */
  #told(frame: ErrFrame): void {
    const { code, msg: message } = frame;
    const member = this.#named(message);
    // Notices have the names of the capabilities that ask for them.
    if (member && caps.includes(code as Notice["code"])) {
      this.#emit("notice", { code: code as Notice["code"], topic: member.topic, group: member.group!, message });
    } else if (member && (code === "not_subscribed" || code === "forbidden")) member.told(frame);
    // The connection's end tells that.
    else if (code !== "token_expired") this.#emit("error", new EventHubError(code, message));
  }

  /** The one that a message names, best of all. */
  #named(message: string): Member | undefined {
    let named: Member | undefined;
    let longest = 0;
    for (const member of this.#all()) {
      const length = member.named(message);
      if (length <= longest) continue;
      named = member;
      longest = length;
    }
    return named;
  }

  #remove(member: Member): void {
    const { topic, group } = member;
    const groups = this.#members.get(topic);
    if (this.#recent === member) this.#recent = undefined;
    if (groups?.get(group) !== member) return;
    groups.delete(group);
    if (groups.size === 0) this.#members.delete(topic);
  }

  #emit<E extends keyof ClientEvents>(event: E, ...args: Parameters<ClientEvents[E]>): void {
    for (const listener of [...this.#listeners[event]]) {
      try {
        (listener as (...args: unknown[]) => void)(...args);
      } catch (error) {
        queueMicrotask(() => {
          throw error; // as an event target reports it: the client goes on
        });
      }
    }
  }
}

/** Makes a client without waiting for its connection. */
export function createClient(url: string, options?: ClientOptions): Client;
export function createClient<M extends Topics>(url: string, options?: ClientOptions): TypedClient<M>;
export function createClient(url: string, options?: ClientOptions): Client {
  return new Client(url, options);
}

/** Makes a client, and resolves when it is connected. */
export function connect(url: string, options?: ConnectOptions): Promise<Client>;
export function connect<M extends Topics>(url: string, options?: ConnectOptions): Promise<TypedClient<M>>;
export async function connect(url: string, { connectTimeoutMs = 30_000, signal, ...options }: ConnectOptions = {}): Promise<Client> {
  const client = new Client(url, options);
  let last: EventHubError | undefined;
  const off = client.on("state", (_, error) => (last = error ?? last));
  const timeout = new AbortController();
  const timer = setTimeout(() => timeout.abort(), connectTimeoutMs);
  const abort = (): void => timeout.abort(signal?.reason);
  signal?.addEventListener("abort", abort, { once: true });
  if (signal?.aborted) abort();
  try {
    await client.ready(timeout.signal);
  } catch (error) {
    void client.close({ timeoutMs: 0 });
    if (!timeout.signal.aborted) throw error;
    if (signal?.aborted) throw aborted(signal);
    throw new EventHubError("connect_timeout", `No connection after ${connectTimeoutMs} ms: ${last?.message ?? "The hub does not answer."}`, true, { cause: last });
  } finally {
    clearTimeout(timer);
    off();
    signal?.removeEventListener("abort", abort);
  }
  return client;
}

/**
 * Collects what is to run when the frames at hand have been read. Timers would wait for a second in
 * a hidden tab.
 */
function newBatch(): (run: () => void) => void {
  let runs: (() => void)[] = [];
  const all = (): void => {
    const now = runs;
    runs = [];
    for (const run of now) run();
  };
  const { setImmediate } = globalThis as { setImmediate?: (f: () => void) => unknown };
  let soon = (): void => void setImmediate!(all);
  if (!setImmediate) {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = all;
    soon = () => port2.postMessage(0);
  }
  return (run) => {
    if (runs.push(run) === 1) soon();
  };
}

/** Without the fields that are undefined, so that defaults apply. */
function defined<T extends object>(options: T): { [K in keyof T]: Exclude<T[K], undefined> } {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined)) as never;
}
