import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import * as esm from "eventhub-client";
import * as compat from "eventhub-client/compat";
import { newIdMaker } from "../dist/esm/id.js";
import { startHub } from "./hub.mjs";

const require = createRequire(import.meta.url);
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

test("the package has what users need, and nothing of the tests, the examples and the macros", () => {
  const cwd = fileURLToPath(new URL("..", import.meta.url));
  const [{ files }] = JSON.parse(execFileSync("npm", ["pack", "--dry-run", "--json", "--ignore-scripts"], { cwd, stdio: ["ignore", "pipe", "ignore"] }));
  const parts = new Set(files.map(({ path }) => path.split("/")[0]));
  assert.deepEqual([...parts].sort(), ["README.md", "dist", "package.json", "src"]);
});
