// Runs the older clients as they were written: node test/notes.mjs FOLDER
//
// FOLDER has Markdown with the sources of EventClient and PromClient. The script takes them from
// there, and leaves nothing of them here. It runs them against a real hub, in Node and in Chromium,
// and compares the frames that they send with the scenarios of testdata/frames: those have to have
// all of them, and no others.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { randomUUID } from "node:crypto";
import { once } from "node:events";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import ts from "typescript";
import WebSocket from "ws";
import { startHub } from "./hub.mjs";
import { event, prom, recorder } from "./older.mjs";

const [folder] = process.argv.slice(2);
if (!folder) throw new Error("which folder? Write: node test/notes.mjs FOLDER");
const chromium = process.env.CHROMIUM ?? "chromium";
const frames = new URL("../../testdata/frames/", import.meta.url);
const scenarios = {
  EventClient: ["event_client", "event_client_errors", "event_client_without_token"],
  PromClient: ["prom_client", "prom_client_errors"],
};

/** The code block that defines a class, as JavaScript. */
function source(name, module) {
  const found = readdirSync(folder)
    .filter((file) => file.endsWith(".md"))
    .flatMap((file) => [...readFileSync(join(folder, file), "utf8").matchAll(/^```\w*\n(.*?)^```/gms)])
    .map(([, code]) => code)
    .filter((code) => code.includes(`export class ${name} `));
  assert.equal(found.length, 1, `${folder} has ${found.length} code blocks with the class ${name}`);
  const options = { module, target: ts.ScriptTarget.ES2022, esModuleInterop: true };
  const { outputText, diagnostics } = ts.transpileModule(found[0], { compilerOptions: options, reportDiagnostics: true });
  assert.deepEqual(diagnostics.map(({ messageText }) => messageText), []);
  return outputText;
}

/** The class in this process, with a WebSocket that is recorded. */
function load(name, ws) {
  const exports = {};
  new Function("exports", "require", source(name, ts.ModuleKind.CommonJS))(exports, (module) => {
    assert.equal(module, "ws");
    return ws;
  });
  return exports[name];
}

/** The shape of a frame: without what differs from run to run. */
const shape = (text, token, topic) =>
  text
    .replaceAll(token, "${token}")
    .replaceAll(topic, "${topic}")
    .replace(/"corr":"[^"]*"/, '"corr":"…"')
    .replace(/"id":("[0-9a-f-]{36}"|\{"\$ref":"\w+"\})/, '"id":…');

function compare(name, sent, token, topic) {
  const recorded = scenarios[name].flatMap((file) => JSON.parse(readFileSync(new URL(`${file}.json`, frames), "utf8")).steps.flatMap(({ send }) => send ?? []));
  const shapes = (texts) => [...new Set(texts.map((text) => shape(text, token, topic)))].sort();
  assert.deepEqual(shapes(sent), shapes(recorded), `the frames that ${name} sends are not those of testdata/frames`);
}

const hub = await startHub();
const rejections = [];
process.on("unhandledRejection", (error) => rejections.push(error));

async function inNode(how, name, run) {
  const { Recorded, sockets } = recorder(WebSocket);
  const topic = `older.${randomUUID()}`;
  if (how.includes("global")) globalThis.WebSocket = Recorded;
  const ws = Object.assign(Recorded, { default: Recorded, __esModule: true });
  const done = await run(load(name, ws), { url: hub.websocket, token: hub.token, topic, sockets, rejections });
  delete globalThis.WebSocket;
  report(name, how, topic, { done, sent: sockets.flatMap(({ sent }) => sent) });
}

function report(name, how, topic, { done, sent, error }) {
  if (error) throw new Error(`${name} in ${how}: ${error}`);
  compare(name, sent, hub.token, topic);
  console.log(`${name} in ${how}: ${done.join(", ")}; ${sent.length} frames, as in testdata/frames`);
}

async function inChromium() {
  const topic = `older.${randomUUID()}`;
  const here = (file) => readFileSync(new URL(file, import.meta.url), "utf8");
  const page = `<!doctype html><meta charset="utf-8"><title>PromClient</title><script type="module">
    import { prom, recorder } from "/older.mjs";
    const { Recorded, sockets } = recorder(WebSocket);
    globalThis.WebSocket = Recorded;
    const result = { sent: [] };
    try {
      const { PromClient } = await import("/client.js");
      result.done = await prom(PromClient, { url: ${JSON.stringify(hub.websocket)}, token: ${JSON.stringify(hub.token)}, topic: "${topic}", sockets });
    } catch (error) {
      result.error = String(error.stack ?? error);
    }
    result.sent = sockets.flatMap(({ sent }) => sent);
    await fetch("/result", { method: "POST", body: JSON.stringify(result) });
  </script>`;
  const files = { "/": ["text/html", page], "/older.mjs": ["text/javascript", here("older.mjs")], "/client.js": ["text/javascript", source("PromClient", ts.ModuleKind.ES2022)] };
  let tell;
  const result = new Promise((resolve) => (tell = resolve));
  const server = createServer((request, response) => {
    let body = "";
    request.on("data", (data) => (body += data));
    request.on("end", () => {
      const [type, text] = files[request.url] ?? [];
      response.writeHead(text || request.method === "POST" ? 200 : 404, { "content-type": type ?? "text/plain" }).end(text);
      if (request.method === "POST") tell(JSON.parse(body));
    });
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  const profile = mkdtempSync(join(tmpdir(), "eventhub-chromium-"));
  const flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", `--user-data-dir=${profile}`, "--remote-debugging-port=0"];
  const browser = spawn(chromium, [...flags, `http://127.0.0.1:${server.address().port}/`], { stdio: ["ignore", "ignore", "pipe"] });
  let said = "";
  browser.stderr.on("data", (data) => (said += data));
  const ended = once(browser, "exit");
  const late = new Promise((_, reject) => setTimeout(() => reject(new Error(`Chromium gave no result in 60 s:\n${said}`)), 60_000).unref());
  try {
    report("PromClient", "Chromium", topic, await Promise.race([result, late]));
  } finally {
    browser.kill();
    await ended;
    server.close();
    rmSync(profile, { recursive: true, maxRetries: 10, retryDelay: 100 });
  }
}

try {
  await inNode(`Node ${process.versions.node} with ws`, "EventClient", event);
  await inNode(`Node ${process.versions.node} with ws`, "PromClient", prom);
  await inNode(`Node ${process.versions.node} with a global WebSocket`, "PromClient", prom);
  await inChromium();
} finally {
  await hub.stop();
}
