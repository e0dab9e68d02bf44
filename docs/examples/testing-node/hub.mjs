// A hub for tests. Copy this file: it needs nothing but the program eventhub, in PATH or named by
// EVENTHUB.
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";

/** Starts a hub that keeps everything in memory. It also ends when this process does, however that comes about. */
export async function startHub(...flags) {
  const child = spawn(process.env.EVENTHUB ?? "eventhub", ["serve", "--ephemeral", "--log-level=warn", ...flags], {
    stdio: ["pipe", "pipe", "inherit"], // the hub ends when its standard input is closed
  });
  const ended = new Promise((resolve) => child.once("close", resolve));
  const line = await new Promise((resolve, reject) => {
    createInterface(child.stdout).once("line", resolve);
    child.once("error", reject);
    child.once("exit", (code) => reject(new Error(`the hub ended with ${code}`)));
  });
  const stop = () => {
    child.stdin.end();
    return ended;
  };
  return { ...JSON.parse(line), stop }; // websocket, http, ops, nats, token
}
