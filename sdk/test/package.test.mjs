import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { readdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import * as esm from "eventhub-client";
import * as compat from "eventhub-client/compat";
import { newIdMaker } from "../dist/esm/id.js";
import { startHub } from "./hub.mjs";

const require = createRequire(import.meta.url);
const run = promisify(execFile);
let hub;
before(async () => (hub = await startHub()));
after(() => hub.stop());

test("CommonJS has what ES modules have, and works", async () => {
  const cjs = require("eventhub-client");
  assert.deepEqual(Object.keys(cjs).sort(), Object.keys(esm).sort());
  assert.deepEqual(Object.keys(require("eventhub-client/compat")).sort(), Object.keys(compat).sort());
  const client = await cjs.connect(hub.websocket, { token: hub.token });
  await client.publish("commonjs", 1);
  await client.close();
});

test("there is no dependency at run time", () => {
  const pkg = JSON.parse(readFileSync(new URL("../package.json", import.meta.url), "utf8"));
  assert.equal(pkg.dependencies, undefined);
  assert.deepEqual(Object.keys(pkg.peerDependencies), ["ws"]);
  assert.equal(pkg.peerDependenciesMeta.ws.optional, true);
  for (const version of Object.values(pkg.devDependencies)) assert.match(version, /^\d/);
});

test("ids rise, also when the clock is set back or a millisecond is full", () => {
  let now = 1_800_000_000_000;
  const id = newIdMaker(() => now);
  const ids = Array.from({ length: 10_000 }, () => id());
  now -= 60_000;
  ids.push(id(), id());
  now += 120_000;
  ids.push(id());
  assert.deepEqual(ids, [...ids].sort());
  assert.equal(new Set(ids).size, ids.length);
  for (const one of ids) assert.match(one, /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
});

// -- the examples

const examples = fileURLToPath(new URL("../examples/", import.meta.url));

for (const name of readdirSync(examples)) {
  test(`example ${name}`, async () => {
    const env = { ...process.env, EVENTHUB_URL: hub.websocket, EVENTHUB_HTTP: hub.http, EVENTHUB_TOKEN: hub.token };
    const { stdout } = await run(process.execPath, [examples + name], { env, timeout: 60_000 });
    const wanted = readFileSync(examples + name, "utf8").match(/^\/\/ Prints: (.*)$/gm).map((line) => line.slice("// Prints: ".length));
    assert.deepEqual(stdout.trim().split("\n"), wanted);
  });
}

test("README shows the examples as they are", () => {
  const readme = readFileSync(new URL("../README.md", import.meta.url), "utf8");
  const shown = [...readme.matchAll(/```js\n(.*?)```/gs)].map(([, code]) => code.trim());
  const code = readdirSync(examples).map((name) => readFileSync(examples + name, "utf8").trim());
  assert.ok(shown.length >= 2);
  for (const block of shown) assert.ok(code.some((text) => text.includes(block)), block);
  for (const name of readdirSync(examples)) assert.ok(readme.includes(`examples/${name}`), name);
});
