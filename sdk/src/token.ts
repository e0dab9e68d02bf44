import { EventHubError } from "./errors.js";

/**
 * A token, or a function that gets one. The function is asked for each connection, and before the
 * token expires.
 */
export type TokenSource = string | (() => string | Promise<string>);

/**
 * Asks the source. Whoever asks while a question is open gets the answer to that question, so that
 * a reconnect and a refresh at the same time cost one request. A question that has no answer in time
 * is over: a browser may never end a request of a page that it froze.
 */
export class Tokens {
  #open: Promise<string> | undefined;

  constructor(
    private readonly source: TokenSource | undefined,
    private readonly timeoutMs = 30_000,
  ) {}

  /** Whether another question may bring another token. */
  get changes(): boolean {
    return typeof this.source === "function";
  }

  ask(): Promise<string> {
    const { source } = this;
    if (typeof source !== "function") return Promise.resolve(source ?? "");
    if (this.#open) return this.#open;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const late = new Promise<void>((resolve) => {
      timer = setTimeout(resolve, this.timeoutMs);
      (timer as { unref?: () => void }).unref?.(); // keeps no process alive
    });
    this.#open = Promise.race([Promise.resolve().then(source), late])
      .then((token) => {
        if (typeof token !== "string" || token === "") throw new EventHubError("no_token", "The token provider failed: timeout");
        return token;
      })
      .finally(() => {
        clearTimeout(timer);
        this.#open = undefined;
      });
    return this.#open;
  }
}

/** When a JWT expires, in epoch milliseconds; undefined for other tokens. */
export function expiry(token: string): number | undefined {
  const claims = token.split(".")[1];
  if (claims === undefined) return undefined;
  try {
    const { exp } = JSON.parse(atob(claims.replace(/-/g, "+").replace(/_/g, "/"))) as { exp?: unknown };
    return typeof exp === "number" ? exp * 1000 : undefined;
  } catch {
    return undefined; // not a JWT
  }
}

/**
 * When a token that the hub has taken is replaced: a fifth of what is left before its end, a minute
 * at most. If nothing is left, the clock of this machine is wrong.
 */
export function refreshDelay(expires: number, now: number): number {
  const left = expires - now;
  if (left <= 0) return 30_000;
  return Math.min(left - Math.min(left / 5, 60_000), 2 ** 31 - 1);
}
