/**
 * The life of a connection, as one table: for each state and input, the next state and what has to
 * be done. An input that a state does not list changes nothing, so news of an earlier attempt
 * cannot disturb a later one.
 *
 * Everything else about reconnecting hangs on the actions. README.md shows the same table, and a
 * test compares the two.
 */
export type State = "idle" | "token" | "opening" | "authenticating" | "ready" | "waiting" | "failed" | "closed";

export type Input =
  /** The client wants a connection. */
  | "start"
  /** The token provider answered. */
  | "token"
  /** The socket is open. */
  | "open"
  /** The hub accepted the token. */
  | "accepted"
  /** The attempt or the connection is over, and another may succeed. */
  | "lost"
  /** It is over, and no other attempt would succeed. */
  | "refused"
  /** The pause is over, or the network came back. */
  | "wake"
  /** The client closes. */
  | "close";

export type Action =
  /** Ask the token provider. */
  | "fetch"
  /** Open a socket. */
  | "dial"
  /** Send AUTH. */
  | "auth"
  /** Subscribe again and send what waits. */
  | "resume"
  /** Forget leases, and take note of publishes in doubt. */
  | "suspend"
  /** Close the socket, and hear nothing of it any more. */
  | "drop"
  /** Wait for a while that grows with each attempt. */
  | "pause"
  /** Fail everything that waits. */
  | "end";

export type Transition = readonly [next: State, ...actions: Action[]];

export const table: Readonly<Record<State, Readonly<Partial<Record<Input, Transition>>>>> = {
  idle: {
    start: ["token", "fetch"],
    close: ["closed", "end"],
  },
  token: {
    token: ["opening", "dial"],
    lost: ["waiting", "pause"],
    refused: ["failed", "end"],
    close: ["closed", "end"],
  },
  opening: {
    open: ["authenticating", "auth"],
    lost: ["waiting", "drop", "pause"],
    refused: ["failed", "drop", "end"],
    close: ["closed", "drop", "end"],
  },
  authenticating: {
    accepted: ["ready", "resume"],
    lost: ["waiting", "drop", "pause"],
    refused: ["failed", "drop", "end"],
    close: ["closed", "drop", "end"],
  },
  ready: {
    lost: ["waiting", "drop", "suspend", "pause"],
    refused: ["failed", "drop", "suspend", "end"],
    close: ["closed", "drop", "suspend", "end"],
  },
  waiting: {
    wake: ["token", "fetch"],
    close: ["closed", "end"],
  },
  failed: {},
  closed: {},
};

/** The transition for an input, or undefined if the input changes nothing. */
export function step(state: State, input: Input): Transition | undefined {
  return table[state][input];
}
