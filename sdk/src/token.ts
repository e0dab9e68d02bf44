import { EventHubError } from "./errors.js";

/**
 * A token, or a function that gets one. The function is asked for each connection, and before the
 * token expires.
 */
export type TokenSource = string | (() => string | Promise<string>);

/**
 * Asks the source. Whoever asks while a question is open gets the answer to that question, so that
 * a reconnect and a refresh at the same time cost one request.
 */
export class Tokens {
  #open: Promise<string> | undefined;

  constructor(private readonly source: TokenSource | undefined) {}

  /** Whether another question may bring another token. */
  get changes(): boolean {
    return typeof this.source === "function";
  }

  ask(): Promise<string> {
    const { source } = this;
    if (typeof source !== "function") return Promise.resolve(source ?? "");
    this.#open ??= Promise.resolve()
      .then(source)
      .then((token) => {
        if (typeof token !== "string" || token === "") throw new EventHubError("no_token", "The token provider returned no token.");
        return token;
      })
      .finally(() => (this.#open = undefined));
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

/** How long before its end a token is replaced: a fifth of what is left, a minute at most. */
export function refreshDelay(expires: number, now: number): number {
  const left = Math.max(0, expires - now);
  return Math.min(left - Math.min(left / 5, 60_000), 2 ** 31 - 1);
}
