import type { EventRecord } from "./frames.js";

/** What a delivery needs of its subscription. */
export interface Settler {
  readonly topic: string;
  readonly group: string;
  ack(delivery: Delivery): boolean;
  nack(delivery: Delivery, reason: string, delayMs: number | undefined): boolean;
  extend(delivery: Delivery, ms: number): boolean;
}

/**
 * An event in the hands of this client: a lease, which ends when it is settled or when its time is
 * over.
 */
export class Delivery<T = any> {
  /** Settled by the handler or for it. */
  settled = false;
  /** The lease has ended without being settled: the hub delivers the event again. */
  lost = false;
  /** The same event, delivered anew while its handler still ran. */
  again: Delivery | undefined;
  /** When the lease is prolonged next, and until when. */
  due = 0;
  until = 0;
  #abort: AbortController | undefined;

  constructor(
    private readonly by: Settler,
    readonly event: EventRecord<T>,
    /** Counts from 1. */
    readonly attempt: number,
    /** How long the lease lasted when the event came, in milliseconds. */
    readonly ack_deadline_ms: number,
  ) {}

  get topic(): string {
    return this.by.topic;
  }

  get group(): string {
    return this.by.group;
  }

  /** Settles the event. False if the lease is over: then the event comes again. */
  ack(): boolean {
    return this.by.ack(this);
  }

  /**
   * Refuses the event, which is delivered again, or becomes a dead letter after its last attempt.
   */
  nack(reason = "", delayMs?: number): boolean {
    return this.by.nack(this, reason, delayMs);
  }

  /** Sets the lease to end this many milliseconds from now. */
  extend(ms: number): boolean {
    return this.by.extend(this, ms);
  }

  /** Is aborted when the lease is lost. What the handler still does, another may do as well. */
  get signal(): AbortSignal {
    this.#abort ??= new AbortController();
    if (this.lost) this.#abort.abort();
    return this.#abort.signal;
  }

  lose(): void {
    this.lost = true;
    this.#abort?.abort();
  }
}
