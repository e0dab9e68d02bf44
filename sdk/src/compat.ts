import { Client, type ClientOptions } from "./client.js";
import { EventHubError } from "./errors.js";
import type { EventRecord, HubSubscribeOptions, OkFrame, PublishOptions } from "./frames.js";
import type { Subscription } from "./subscription.js";

/** A handler of the older clients. */
export type CompatHandler<T = any> = (event: EventRecord<T>, ctx: { attempt: number; ack_deadline_ms: number }) => unknown;

/** The subscriptions of an older client, which names them by topic and group. */
class Named {
  readonly #subscriptions = new Map<string, Subscription>();

  constructor(readonly client: Client) {}

  async subscribe<T>(topic: string, group: string, handler: CompatHandler<T>, opts: HubSubscribeOptions | undefined): Promise<void> {
    // Known at once: its first event may come before the hub's answer has been seen.
    const subscription = this.client["join"]<T>(topic, group, handler, opts ?? {});
    const key = `${topic}::${group}`;
    this.#subscriptions.set(key, subscription);
    void subscription.closed.then(() => this.#subscriptions.get(key) === subscription && this.#subscriptions.delete(key));
    await subscription.opened.catch((error: EventHubError) => {
      if (error.code !== "aborted") throw error; // it was left again meanwhile
    });
  }

  get(topic: string, group: string): Subscription {
    const subscription = this.#subscriptions.get(`${topic}::${group}`);
    if (!subscription) throw new EventHubError("not_subscribed", `${topic}::${group}`);
    return subscription;
  }
}

/**
 * A client with the methods of the older EventClient. It connects at once. What it adds: it
 * reconnects, a refused token rejects the calls instead of ending the process, and a handler that
 * throws at once refuses its event.
 */
export class EventClient {
  readonly #named: Named;

  constructor(url: string, token?: string, options: ClientOptions = {}) {
    this.#named = new Named(new Client(url, token === undefined ? options : { ...options, token }));
  }

  /** Resolves with an answer that has the event's id. */
  async publish(topic: string, payload: unknown, opts?: PublishOptions): Promise<OkFrame & { id: string }> {
    return { op: "OK", id: await this.#named.client.publish(topic, payload, opts) };
  }

  async subscribe(topic: string, group: string, handler: CompatHandler, opts?: HubSubscribeOptions): Promise<OkFrame> {
    await this.#named.subscribe(topic, group, handler, opts);
    return { op: "OK" };
  }

  async unsubscribe(topic: string, group: string): Promise<OkFrame> {
    await this.#named.get(topic, group).unsubscribe();
    return { op: "OK" };
  }

  modAck(topic: string, group: string, id: string, extend_ms: number): void {
    this.#named.get(topic, group).extendId(id, extend_ms);
  }

  close(): Promise<void> {
    return this.#named.client.close();
  }
}

/**
 * A client with the methods of the older PromClient, for Node and browsers. What it adds: it
 * reconnects, `publish` rejects when the event is not stored, `subscribe` rejects when it is
 * refused, and a handler that throws at once refuses its event.
 */
export class PromClient {
  readonly #url: string;
  readonly #options: ClientOptions;
  #client: Client | undefined;
  #open: Promise<Named> | undefined;

  constructor(url: string, token?: string, options: ClientOptions = {}) {
    this.#url = url;
    this.#options = token === undefined ? options : { ...options, token };
  }

  async connect(): Promise<void> {
    await this.#named();
  }

  #named(): Promise<Named> {
    this.#open ??= (async () => {
      const client = (this.#client = new Client(this.#url, this.#options));
      try {
        await client.ready();
      } catch (error) {
        if (this.#client === client) this.#open = undefined; // a later call tries again
        throw error;
      }
      return new Named(client);
    })();
    return this.#open;
  }

  /** Resolves when the event is stored. */
  async publish<T>(topic: string, payload: T, opts?: PublishOptions): Promise<void> {
    await (await this.#named()).client.publish(topic, payload, opts);
  }

  async subscribe<T = any>(topic: string, group: string, handler: CompatHandler<T>, opts?: HubSubscribeOptions): Promise<void> {
    await (await this.#named()).subscribe(topic, group, handler, opts);
  }

  async unsubscribe(topic: string, group: string): Promise<void> {
    await (await this.#named()).get(topic, group).unsubscribe();
  }

  close(): void {
    void this.#client?.close();
    this.#client = this.#open = undefined;
  }
}
