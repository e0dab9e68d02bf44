import { aborted, EventHubError } from "./errors.js";
import type { ErrFrame, PublishOptions } from "./frames.js";
import { newIdMaker } from "./id.js";

export interface PublisherOptions {
  /** The most publishes that wait for their answers at a time, sent or not. Defaults to 10,000. */
  bufferEvents?: number;
  /** The most bytes of them. Defaults to 16 MiB. */
  bufferBytes?: number;
  /** The most publishes that are on their way to the hub at a time. Defaults to 1,000. */
  window?: number;
  /**
   * For how long the hub knows an id. A publish in doubt is sent again only well within this time.
   * Defaults to two minutes, as topics do.
   */
  duplicateWindowMs?: number;
  /** For how long a publish is repeated that the hub refuses for the moment. Defaults to 30,000. */
  retryMs?: number;
}

interface Pending {
  readonly corr: number;
  readonly text: string;
  readonly id: string;
  readonly made: number;
  resolve(id: string): void;
  reject(error: EventHubError): void;
  /** When the event was first sent, by the clock on the wall; 0 while it was not. */
  sent: number;
  /** The same by a clock that nobody sets. */
  sentSteady: number;
  /** When it was sent last, by that clock. */
  sentLast: number;
  /** The hub may have stored the event. */
  doubt: boolean;
  retries: number;
  /** Its caller has its answer. */
  done: boolean;
}

/** The hub skips longer frames. */
const maxFrame = 4 * 2 ** 20;
const sweepMs = 250;

/** These say that nothing was stored, and that a later attempt may succeed. */
const notNow = new Set(["rate_limited", "overloaded"]);

/**
 * Sends events and sees to it that each is answered once. Every event has an id, so that it can be
 * sent again after its connection broke.
 */
export class Publisher {
  readonly #options: Required<PublisherOptions>;
  readonly #send: (text: string) => void;
  readonly #corr: () => number;
  readonly #id = newIdMaker();
  /** Not sent, or to be sent again; by corr. */
  #queue: Pending[] = [];
  /** Sent on this connection and not answered, in this order. */
  readonly #sent = new Map<number, Pending>();
  /** In neither of them: these wait for another try. */
  readonly #resting = new Map<Pending, ReturnType<typeof setTimeout>>();
  #bytes = 0;
  #ready = false;
  #halted: ReturnType<typeof setTimeout> | undefined;
  #halts = 0;
  #sweeper: ReturnType<typeof setInterval> | undefined;
  #over: EventHubError | undefined;
  #idle: (() => void)[] = [];
  #topic = "";
  #head = "";

  constructor(options: PublisherOptions, send: (text: string) => void, corr: () => number) {
    this.#options = {
      bufferEvents: 10_000,
      bufferBytes: 16 * 2 ** 20,
      window: 1_000,
      duplicateWindowMs: 120_000,
      retryMs: 30_000,
      ...options,
    };
    this.#send = send;
    this.#corr = corr;
  }

  /** How many publishes have no answer yet. */
  get pending(): number {
    return this.#queue.length + this.#sent.size + this.#resting.size;
  }

  publish(topic: string, payload: unknown, opts: PublishOptions | undefined, signal: AbortSignal | undefined): Promise<string> {
    return new Promise((resolve, reject) => {
      if (this.#over) throw this.#over;
      if (signal?.aborted) throw aborted(signal);
      const id = opts?.id ?? this.#id();
      const corr = this.#corr();
      const text = this.#text(topic, payload, opts, id, corr);
      if (this.pending >= this.#options.bufferEvents || this.#bytes + text.length > this.#options.bufferBytes) {
        throw new EventHubError("buffer_full", `${this.pending} events wait for their answers: wait, or use publishMany.`);
      }
      const p: Pending = { corr, text, id, made: performance.now(), resolve, reject, sent: 0, sentSteady: 0, sentLast: 0, doubt: false, retries: 0, done: false };
      this.#bytes += text.length;
      if (signal) {
        const abort = (): void => this.#abort(p, signal);
        signal.addEventListener("abort", abort, { once: true });
        p.resolve = (id) => (signal.removeEventListener("abort", abort), resolve(id));
        p.reject = (error) => (signal.removeEventListener("abort", abort), reject(error));
      }
      if (this.#ready && this.#queue.length === 0 && !this.#halted && this.#sent.size < this.#options.window) this.#transmit(p);
      else this.#queue.push(p);
    });
  }

  #text(topic: string, payload: unknown, opts: PublishOptions | undefined, id: string, corr: number): string {
    if (topic !== this.#topic) {
      this.#head = `{"op":"PUBLISH","topic":${JSON.stringify(topic)},"payload":`;
      this.#topic = topic;
    }
    let json: string | undefined;
    try {
      json = JSON.stringify(payload) as string | undefined;
    } catch (cause) {
      throw new EventHubError("invalid", `The payload has no JSON form: ${cause as Error}`, false, { cause });
    }
    const options = opts ? JSON.stringify({ ...opts, id }) : `{"id":"${id}"}`;
    const text = `${this.#head}${json ?? "null"},"opts":${options},"corr":${corr}}`;
    // The hub would answer without a corr.
    if (text.length > maxFrame || (text.length > maxFrame / 3 && byteLength(text) > maxFrame)) {
      throw new EventHubError("publish_failed", `The event is larger than ${maxFrame} bytes.`, false);
    }
    return text;
  }

  #transmit(p: Pending): void {
    const now = performance.now();
    if (p.sent === 0) {
      p.sent = Date.now();
      p.sentSteady = now;
    }
    p.sentLast = now;
    this.#sent.set(p.corr, p);
    this.#send(p.text);
  }

  /** The hub answered. False if the answer belongs to no publish. */
  ok(corr: number, id: string | undefined): boolean {
    const p = this.#sent.get(corr);
    if (!p) return false;
    this.#sent.delete(corr);
    this.#halts = 0;
    this.#settle(p);
    p.resolve(id ?? p.id);
    if (this.#queue.length > 0) this.#pump();
    else this.#tellIdle();
    return true;
  }

  err(corr: number, frame: ErrFrame): boolean {
    const p = this.#sent.get(corr);
    if (!p) return false;
    this.#sent.delete(corr);
    const error = new EventHubError(frame.code, frame.msg, frame.retryable);
    const young = performance.now() - p.made < this.#options.retryMs;
    if (p.done) this.#settle(p);
    // A new token was refused: the connection ends.
    else if (frame.code === "unauthorized") this.#back(p);
    else if (notNow.has(frame.code) && young) {
      this.#back(p);
      this.#halt();
    } else if (frame.code === "publish_failed") {
      this.#unconfirmed(p, error, young);
    } else this.#fail(p, p.doubt ? unknown(error) : error);
    this.#pump();
    return true;
  }

  /** The hub refuses the event, or does not know whether it is stored. Repeating the publish tells. */
  #unconfirmed(p: Pending, error: EventHubError, young: boolean): void {
    p.doubt ||= error.retryable;
    if (!young || !error.retryable) {
      this.#fail(p, error);
      return;
    }
    const again = (): void => {
      this.#resting.delete(p);
      this.#back(p);
      this.#pump();
    };
    this.#resting.set(p, setTimeout(again, backoff(p.retries++)));
  }

  /** Puts a publish where it belongs in the queue. */
  #back(p: Pending): void {
    const at = this.#queue.findIndex((other) => other.corr > p.corr);
    this.#queue.splice(at < 0 ? this.#queue.length : at, 0, p);
  }

  #halt(): void {
    if (this.#halted) return;
    this.#halted = setTimeout(() => {
      this.#halted = undefined;
      this.#pump();
    }, backoff(this.#halts++));
  }

  #pump(): void {
    let next = 0;
    while (this.#ready && !this.#halted && next < this.#queue.length && this.#sent.size < this.#options.window) {
      const p = this.#queue[next++]!;
      if (p.doubt && this.#late(p)) this.#fail(p, unknown());
      else this.#transmit(p);
    }
    if (next > 0) this.#queue.splice(0, next);
    this.#sweeping();
    this.#tellIdle();
  }

  /** Whether the hub may have forgotten the id. A sixth of the window is left for the way. */
  #late(p: Pending): boolean {
    const age = Math.max(Date.now() - p.sent, performance.now() - p.sentSteady);
    return age > (this.#options.duplicateWindowMs * 5) / 6;
  }

  /** Rejects what has waited too long. Runs while something waits. */
  #sweeping(): void {
    if (this.#queue.length > 0) this.#sweeper ??= setInterval(() => this.#sweep(), sweepMs);
    else if (this.#sweeper) {
      clearInterval(this.#sweeper);
      this.#sweeper = undefined;
    }
  }

  #sweep(): void {
    this.#queue = this.#queue.filter((p) => {
      const over = p.doubt && this.#late(p);
      if (over) this.#fail(p, unknown());
      return !over;
    });
    this.#pump();
  }

  resume(): void {
    this.#ready = true;
    this.#pump();
  }

  /** The connection has ended. What was sent on it is in doubt. */
  suspend(): void {
    this.#ready = false;
    clearTimeout(this.#halted);
    this.#halted = undefined;
    const unanswered = [...this.#sent.values()];
    this.#sent.clear();
    for (const p of unanswered) {
      p.doubt = true;
      if (p.done) this.#settle(p);
    }
    this.#queue = [...unanswered.filter((p) => !p.done), ...this.#queue].sort((a, b) => a.corr - b.corr);
    this.#sweeping();
    this.#tellIdle();
  }

  /** Fails everything, now and from now on. */
  end(error: EventHubError): void {
    this.#over = error;
    this.#ready = false;
    clearTimeout(this.#halted);
    clearInterval(this.#sweeper);
    for (const timer of this.#resting.values()) clearTimeout(timer);
    const all = [...this.#sent.values(), ...this.#resting.keys(), ...this.#queue];
    this.#sent.clear();
    this.#resting.clear();
    this.#queue = [];
    for (const p of all) this.#fail(p, p.doubt || p.sent > 0 ? unknown(error) : error);
    this.#tellIdle();
  }

  #abort(p: Pending, signal: AbortSignal): void {
    if (p.done) return;
    const error = p.sent > 0 ? unknown(aborted(signal)) : aborted(signal);
    p.done = true; // the answer frees the place of one that is on its way
    const at = this.#queue.indexOf(p);
    if (at >= 0) {
      this.#queue.splice(at, 1);
      this.#settle(p);
      this.#tellIdle();
    }
    p.reject(error);
  }

  #fail(p: Pending, error: EventHubError): void {
    this.#settle(p);
    p.reject(error);
  }

  #settle(p: Pending): void {
    p.done = true;
    this.#bytes -= p.text.length;
  }

  #tellIdle(): void {
    if (this.#idle.length === 0 || this.pending > 0) return;
    for (const f of this.#idle) f();
    this.#idle = [];
  }

  /** How long the oldest frame on its way has waited, in milliseconds. */
  unanswered(): number {
    for (const p of this.#sent.values()) return performance.now() - p.sentLast;
    return 0;
  }

  /** Resolves when nothing waits for an answer. */
  idle(): Promise<void> {
    if (this.pending === 0) return Promise.resolve();
    return new Promise((resolve) => this.#idle.push(resolve));
  }
}

function unknown(cause?: EventHubError): EventHubError {
  return new EventHubError("outcome_unknown", "The event may or may not be stored.", false, cause && { cause });
}

export function backoff(n: number): number {
  return Math.min(5_000, 100 * 2 ** n) * (0.5 + Math.random() / 2);
}

function byteLength(text: string): number {
  return new TextEncoder().encode(text).length;
}
