import { type ClientCode, EventHubError, givesUp } from "./errors.js";
import { caps, type HubFrame } from "./frames.js";
import { step, type Action, type Input, type State } from "./machine.js";
import { findWebSocket, openSocket, type Socket, type WebSocketConstructor } from "./socket.js";
import { expiry, refreshDelay, Tokens, type TokenSource } from "./token.js";

export interface ConnectionOptions {
  url: string;
  token?: TokenSource;
  /** Defaults to the WebSocket of the platform, else that of the package `ws`. */
  WebSocket?: WebSocketConstructor;
  /**
   * The first pause before a new attempt. Each further pause is twice as long. Defaults to 1,000.
   */
  minPauseMs?: number;
  /** The longest pause. Defaults to 30,000. */
  maxPauseMs?: number;
  /** How long an attempt may take, from the socket to the accepted token. Defaults to 10,000. */
  attemptTimeoutMs?: number;
  /** How long the token provider may take before it is asked again. Defaults to 30,000. */
  tokenTimeoutMs?: number;
  /** After this much silence the client asks whether the hub is there. Defaults to 15,000. */
  pingMs?: number;
}

/** What a connection reports to the client. */
export interface ConnectionOwner {
  resume(): void;
  suspend(): void;
  ended(error: EventHubError): void;
  changed(state: State, error: EventHubError | undefined): void;
  /** Takes an EVENT frame, as text. False if it has to be parsed. */
  event(text: string): boolean;
  /** Takes any frame. */
  frame(frame: HubFrame): void;
  /** How long the oldest unanswered frame has waited, in milliseconds. */
  unanswered(): number;
}

/** The hub answers within 15 seconds. */
const answerMs = 20_000;
/** A connection that lasted this long was good: the pauses begin again. */
const goodMs = 5_000;
/** A provider whose tokens are refused this often in a row has no better one. */
const maxRefusals = 3;
const authCorr = "auth";
const pingCorr = "ping";
// Has no effect, and is answered at once.
const pingFrame = JSON.stringify({ op: "UNSUBSCRIBE", topic: "ping", group: "ping", corr: pingCorr });

/** Keeps one connection to the hub, as the table in machine.ts says. */
export class Connection {
  state: State = "idle";
  readonly #tokens: Tokens;
  readonly #options: Required<Omit<ConnectionOptions, "token" | "WebSocket">> & ConnectionOptions;
  readonly #owner: ConnectionOwner;
  #WebSocket: WebSocketConstructor | undefined;
  #socket: Socket | undefined;
  #token = "";
  /** Counts connections and attempts. What belongs to an earlier one is not acted upon. */
  #epoch = 0;
  #failures = 0;
  #refusals = 0;
  /** How long the hub that ended asks to wait, in milliseconds. */
  #restMs = 0;
  #error: EventHubError | undefined;
  #readySince = 0;
  #heard = false;
  #pinged = false;
  #timers: { attempt?: Timer; pause?: Timer; refresh?: Timer; watch?: Timer } = {};
  readonly #over = new AbortController();

  constructor(options: ConnectionOptions, owner: ConnectionOwner) {
    this.#options = { minPauseMs: 1_000, maxPauseMs: 30_000, attemptTimeoutMs: 10_000, tokenTimeoutMs: 30_000, pingMs: 15_000, ...options };
    this.#WebSocket = options.WebSocket;
    this.#tokens = new Tokens(options.token, this.#options.tokenTimeoutMs);
    this.#owner = owner;
    // A browser says when the network goes, and when the network or the user comes back.
    const page = globalThis as { addEventListener?: unknown; document?: EventTarget & { hidden?: boolean } };
    if (typeof page.addEventListener === "function") {
      const { signal } = this.#over;
      const { document } = page;
      (page as EventTarget).addEventListener("online", () => this.#awake(), { signal });
      (page as EventTarget).addEventListener("offline", () => this.#check(), { signal });
      document?.addEventListener("visibilitychange", () => document.hidden || this.#awake(), { signal });
    }
  }

  /** Sends a frame, if the socket is open. */
  send(text: string): void {
    this.#socket?.send(text);
  }

  start(): void {
    this.#input("start");
  }

  close(): void {
    this.#end("close", new EventHubError("closed", "The client is closed."));
  }

  #input(input: Input): void {
    const transition = step(this.state, input);
    if (!transition) return;
    const [next, ...actions] = transition;
    this.#epoch++;
    this.state = next;
    for (const action of actions) this.#actions[action]();
    this.#owner.changed(next, this.#error);
  }

  #end(input: Input, error: EventHubError): void {
    this.#error = error;
    this.#input(input);
  }

  #silent(code: ClientCode = "connection_lost"): void {
    this.#end("lost", new EventHubError(code, "The hub does not answer."));
  }

  readonly #actions: Record<Action, () => void> = {
    fetch: () => {
      const epoch = this.#epoch;
      const ready = Promise.all([this.#tokens.ask(), this.#WebSocket ?? findWebSocket()]);
      ready.then(
        ([token, WebSocket]) => {
          if (this.#epoch !== epoch) return;
          this.#token = token;
          this.#WebSocket = WebSocket;
          this.#input("token");
        },
        (cause: unknown) => {
          if (this.#epoch !== epoch) return;
          if (cause instanceof EventHubError && cause.code === "no_websocket") this.#end("refused", cause);
          else this.#end("lost", new EventHubError("connection_lost", `The token provider failed: ${cause as Error}`, true, { cause }));
        },
      );
    },
    dial: () => {
      this.#timers.attempt = setTimeout(() => this.#silent("connect_timeout"), this.#options.attemptTimeoutMs);
      let current: Socket | undefined;
      const mine = (): boolean => current === this.#socket;
      try {
        current = openSocket(this.#WebSocket!, this.#options.url, {
          opened: () => mine() && this.#input("open"),
          text: (data) => mine() && this.#text(data),
          ended: (code, reason) => mine() && this.#ended(code, reason),
        });
        this.#socket = current;
      } catch (cause) {
        // The platform refuses the address itself: it is malformed, or not allowed on this page.
        const epoch = this.#epoch;
        queueMicrotask(() => this.#epoch === epoch && this.#end("refused", new EventHubError("gave_up", `Bad address: ${cause as Error}`, false, { cause })));
      }
    },
    auth: () => this.#auth(),
    resume: () => {
      clearTimeout(this.#timers.attempt);
      this.#readySince = performance.now();
      this.#refusals = 0;
      this.#error = undefined;
      this.#planRefresh(0);
      this.#watch();
      this.#owner.resume();
    },
    suspend: () => {
      if (performance.now() - this.#readySince >= goodMs) this.#failures = 0;
      this.#owner.suspend();
    },
    drop: () => {
      this.#stopTimers();
      const socket = this.#socket;
      this.#socket = undefined;
      socket?.drop();
    },
    pause: () => {
      const { minPauseMs, maxPauseMs } = this.#options;
      const pause = Math.min(maxPauseMs, minPauseMs * 2 ** this.#failures++);
      // Clients of a hub that died do not all come at once.
      this.#timers.pause = setTimeout(() => this.#input("wake"), this.#restMs + pause * (0.5 + Math.random() / 2));
      this.#restMs = 0;
    },
    end: () => {
      this.#stopTimers();
      this.#over.abort();
      this.#owner.ended(this.#error!);
    },
  };

  #stopTimers(): void {
    for (const t of Object.values(this.#timers)) clearTimeout(t);
  }

  #auth(): void {
    this.send(JSON.stringify({ op: "AUTH", token: this.#token, caps, corr: authCorr }));
  }

  #ended(code: number, reason: string): void {
    const text = `The connection ended: ${code} ${reason}`.trim() + ".";
    this.#restMs = +(/retry_after_ms=(\d{1,5})$/.exec(reason)?.[1] ?? 0);
    if (givesUp(code)) this.#end("refused", new EventHubError("gave_up", text));
    else this.#end("lost", new EventHubError("connection_lost", text));
  }

  #text(data: string): void {
    this.#heard = true;
    if (this.#owner.event(data)) return;
    let frame: HubFrame;
    try {
      frame = JSON.parse(data) as HubFrame;
    } catch {
      return; // the hub sends JSON only
    }
    if (!(frame as HubFrame | null)?.op) return; // and frames only
    if (frame.op !== "EVENT") {
      if (frame.corr === authCorr) {
        this.#authAnswer(frame.op === "OK" ? undefined : new EventHubError(frame.code, frame.msg, frame.retryable));
        return;
      }
      if (frame.corr === pingCorr) return;
    }
    this.#owner.frame(frame);
  }

  #authAnswer(error: EventHubError | undefined): void {
    if (!error) {
      if (this.state === "ready") {
        this.#refusals = 0;
        this.#planRefresh(1_000);
      } else this.#input("accepted");
      return;
    }
    // A hub that is at its limits may take the token later. Another token may be better.
    const hopeful = error.retryable || (this.#tokens.changes && ++this.#refusals < maxRefusals);
    this.#end(hopeful ? "lost" : "refused", error);
  }

  /**
   * Replaces the token before it expires. A fresh token that comes when its connection has gone is
   * not used.
   */
  #planRefresh(atLeastMs: number): void {
    clearTimeout(this.#timers.refresh);
    const expires = expiry(this.#token);
    if (expires === undefined || !this.#tokens.changes) return;
    const epoch = this.#epoch;
    const again = (): void => this.#planRefresh(1_000);
    this.#timers.refresh = setTimeout(() => {
      this.#tokens.ask().then(
        (token) => {
          if (this.#epoch !== epoch || this.state !== "ready") return;
          if (token === this.#token) return again();
          this.#token = token;
          this.#auth();
        },
        () => this.#epoch === epoch && again(), // the hub says when the old token has expired
      );
    }, Math.max(atLeastMs, refreshDelay(expires, Date.now())));
  }

  /** Notices a connection that is dead without having ended. */
  #watch(): void {
    this.#heard = this.#pinged = false;
    const every = this.#options.pingMs;
    let last = Date.now();
    const look = (): void => {
      // A page or machine that slept has to listen first.
      const late = Date.now() - last > 2 * every;
      last = Date.now();
      if (!late && ((this.#pinged && !this.#heard) || this.#owner.unanswered() > answerMs)) return this.#silent();
      this.#pinged = !this.#heard;
      if (this.#pinged) this.send(pingFrame);
      this.#heard = false;
      this.#timers.watch = setTimeout(look, every);
    };
    this.#timers.watch = setTimeout(look, every);
  }

  #awake(): void {
    if (this.state === "waiting") {
      clearTimeout(this.#timers.pause);
      this.#input("wake");
    } else this.#check();
  }

  /** The network may have changed under the connection: an answer has to come soon. */
  #check(): void {
    if (this.state !== "ready") return;
    const epoch = this.#epoch;
    this.#heard = false;
    this.send(pingFrame);
    clearTimeout(this.#timers.watch);
    this.#timers.watch = setTimeout(() => {
      if (this.#epoch !== epoch) return;
      if (this.#heard) this.#watch();
      else this.#silent();
    }, Math.min(5_000, this.#options.pingMs));
  }
}

type Timer = ReturnType<typeof setTimeout>;
