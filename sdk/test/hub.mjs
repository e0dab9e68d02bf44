// Real hubs for the tests: the program that EVENTHUB names, which scripts/test.mjs builds.
import { spawn } from "node:child_process";
import { randomUUID } from "node:crypto";
import { once } from "node:events";
import { createInterface } from "node:readline";

const program = process.env.EVENTHUB ?? "eventhub";

/** Starts a hub in memory on free ports. It ends with this process, however that comes about. */
export async function startHub(flags = [], env = {}) {
  const child = spawn(program, ["serve", "--ephemeral", "--log-level=error", ...flags], {
    stdio: ["pipe", "pipe", "inherit"],
    env: { ...process.env, EVENTHUB_LIMIT_NEW_TOPICS: "10000", ...env },
  });
  const [line] = await Promise.race([
    once(createInterface(child.stdout), "line"),
    once(child, "exit").then(([code]) => {
      throw new Error(`the hub ended with ${code}`);
    }),
  ]);
  const ended = once(child, "exit");
  return {
    ...JSON.parse(line), // websocket, http, ops, nats, token
    stop: () => {
      child.stdin.end();
      return ended;
    },
  };
}

/** A hub with a directory, which can be killed and started again on the same ports. */
export class DurableHub {
  #child;
  #dir;
  #ports = ["0", "0", "0"];
  token = "a token of at least sixteen bytes";
  websocket;
  http;

  constructor(dir) {
    this.#dir = dir;
  }

  async start() {
    const [ws, http, ops] = this.#ports;
    const child = spawn(program, ["serve", `--data=${this.#dir}/data`, "--log-level=error", `--ws-port=${ws}`, `--http-port=${http}`, `--ops-port=${ops}`], {
      stdio: ["ignore", "pipe", "inherit"],
      env: { ...process.env, WS_TOKEN: this.token, EVENTHUB_LIMIT_NEW_TOPICS: "10000" },
    });
    this.#child = child;
    const lines = createInterface(child.stdout);
    await new Promise((resolve, reject) => {
      child.once("exit", (code) => reject(new Error(`the hub ended with ${code}`)));
      lines.on("line", (line) => {
        const [name, at] = line.trim().split(/\s+/);
        if (name === "websocket") this.websocket = at;
        if (name === "http") this.http = at;
        if (name === "ops") this.#ports = [this.websocket, this.http, at].map((url) => new URL(url).port);
        if (name === "token") resolve();
      });
    });
  }

  async kill() {
    const ended = once(this.#child, "exit");
    this.#child.kill("SIGKILL");
    await ended;
  }

  async stop() {
    if (this.#child.exitCode !== null || this.#child.signalCode !== null) return;
    const ended = once(this.#child, "exit");
    this.#child.kill("SIGTERM");
    await ended;
  }
}

/** A topic that no other test uses. */
export const newTopic = () => `t.${randomUUID()}`;

/** Waits until a condition holds. */
export async function eventually(what, condition, ms = 30_000) {
  const deadline = Date.now() + ms;
  for (;;) {
    const value = await condition();
    if (value) return value;
    if (Date.now() > deadline) throw new Error(`not within ${ms} ms: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}
