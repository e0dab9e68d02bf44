import { EventHubError } from "./errors.js";

/**
 * What the client needs of a WebSocket: the global one of the platform, or that of the package
 * `ws`.
 */
export interface WebSocketLike {
  readonly readyState: number;
  send(data: string): void;
  close(code?: number, reason?: string): void;
  onopen: ((event: any) => void) | null;
  onmessage: ((event: any) => void) | null;
  onerror: ((event: any) => void) | null;
  onclose: ((event: any) => void) | null;
}

export type WebSocketConstructor = new (url: string, ...rest: any[]) => WebSocketLike;

/** What a socket tells. Nothing comes after `ended`. */
export interface SocketEvents {
  opened(): void;
  text(data: string): void;
  ended(code: number, reason: string): void;
}

export interface Socket {
  send(text: string): void;
  /** Closes the socket. Nothing is told of it any more. */
  drop(): void;
}

/** Finds the WebSocket of the platform, else that of `ws`. */
export async function findWebSocket(): Promise<WebSocketConstructor> {
  const global = (globalThis as { WebSocket?: WebSocketConstructor }).WebSocket;
  if (global) return global;
  try {
    // The name is computed so that bundlers for browsers do not look for the package.
    const name = ["w", "s"].join("");
    return ((await import(/* @vite-ignore */ /* webpackIgnore: true */ name)) as { WebSocket: WebSocketConstructor }).WebSocket;
  } catch {
    throw new EventHubError("no_websocket", "There is no WebSocket: install ws");
  }
}

/** The sockets of `ws` are event emitters, and tell which TCP socket they use. */
interface Emitter {
  on(event: "message", listener: (data: { toString(): string }) => void): void;
  terminate(): void;
  on(event: "upgrade", listener: (response: { socket: Corkable }) => void): void;
}

interface Corkable {
  cork(): void;
  uncork(): void;
}

interface NodeGlobals {
  process?: { nextTick?: (f: () => void) => void };
}

export function openSocket(WebSocket: WebSocketConstructor, url: string, events: SocketEvents): Socket {
  const node = typeof (WebSocket.prototype as Partial<Emitter>).on === "function";
  // The hub does not compress, and sends valid UTF-8 only.
  const ws = node ? new WebSocket(url, { perMessageDeflate: false, skipUTF8Validation: true }) : new WebSocket(url);
  let over = false;
  const end = (code: number, reason: string): void => {
    if (over) return;
    over = true;
    events.ended(code, reason);
  };
  ws.onopen = () => {
    if (over) ws.close();
    else events.opened();
  };
  // Node 20 reports a failed attempt with this event alone. The listener stays when the socket is
  // dropped: `ws` tells of the end of an attempt this way.
  ws.onerror = (event: { message?: string }) => end(1006, event.message ?? "the connection failed");
  ws.onclose = (event: { code: number; reason: string }) => end(event.code, event.reason);

  let send = (text: string): void => ws.send(text);
  if (node) {
    const emitter = ws as unknown as Emitter;
    emitter.on("message", (data) => {
      if (!over) events.text(data.toString());
    });
    // `ws` writes each frame on its own, which is a system call each. What is sent in one turn of
    // the event loop leaves with one.
    emitter.on("upgrade", ({ socket }) => {
      const { nextTick } = (globalThis as NodeGlobals).process ?? {};
      if (!nextTick) return;
      let corked = false;
      const uncork = (): void => {
        corked = false;
        socket.uncork();
      };
      send = (text) => {
        if (!corked) {
          corked = true;
          socket.cork();
          nextTick(uncork);
        }
        ws.send(text);
      };
    });
  } else {
    ws.onmessage = ({ data }: { data: string }) => {
      if (!over) events.text(data);
    };
  }
  return {
    send: (text) => {
      if (!over && ws.readyState === 1) send(text);
    },
    drop: () => {
      over = true;
      ws.close();
      // A hub that is frozen does not answer that, and `ws` would wait for 30 seconds.
      if (node) {
        const timer = setTimeout(() => (ws as unknown as Emitter).terminate(), 2_000);
        ws.onclose = () => clearTimeout(timer);
      }
    },
  };
}
