// Runs each example as it is, and compares what it prints with what it says that it prints.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { fileURLToPath } from "node:url";
import ts from "typescript";
import { startHub } from "./hub.mjs";
import { secret } from "./jwt.mjs";

const root = fileURLToPath(new URL("../", import.meta.url));
const names = readdirSync(join(root, "examples"));
const read = (name) => readFileSync(join(root, "examples", name), "utf8").trim();
let hub, dir;
before(async () => {
  dir = mkdtempSync(join(tmpdir(), "eventhub-examples-"));
  writeFileSync(join(dir, "topics.yaml"), 'topics:\n  - {pattern: "ticker.*", retention: {messages: 10}}\n');
  hub = await startHub([`--topics=${join(dir, "topics.yaml")}`], { JWT_SECRET: secret, WS_TOKEN: "the hub's own token" });
});
after(async () => {
  await hub.stop();
  rmSync(dir, { recursive: true });
});

/** Runs an ES module in the directory of the package. */
async function run(module) {
  const env = { ...process.env, EVENTHUB_URL: hub.websocket, EVENTHUB_HTTP: hub.http, EVENTHUB_TOKEN: hub.token, JWT_SECRET: secret };
  const child = spawn(process.execPath, ["--input-type=module", "-"], { cwd: root, env, timeout: 280_000 });
  let [out, err] = ["", ""];
  child.stdout.on("data", (data) => (out += data));
  child.stderr.on("data", (data) => (err += data));
  child.stdin.end(module);
  const [code] = await once(child, "close");
  assert.equal(code, 0, `${out}${err}`);
  return out.trim().split("\n");
}

const options = { module: ts.ModuleKind.ES2022, target: ts.ScriptTarget.ES2022 };

// They wait more than they compute.
describe("examples", { concurrency: 4 }, () => {
  for (const name of names.filter((name) => !name.endsWith(".html"))) {
    test(name, async () => {
      const code = read(name);
      const wanted = code.match(/^\/\/ Prints: (.*)$/gm).map((line) => line.slice("// Prints: ".length));
      assert.deepEqual(await run(name.endsWith(".ts") ? ts.transpile(code, options) : code), wanted);
    });
  }
});

test("README shows the examples as they are, and lists all of them", () => {
  const readme = readFileSync(join(root, "README.md"), "utf8");
  const shown = [...readme.matchAll(/```js\n(.*?)```/gs)].map(([, code]) => code.trim());
  assert.ok(shown.length >= 2);
  for (const block of shown) assert.ok(names.some((name) => read(name).includes(block)), block);
  for (const name of names) assert.ok(readme.includes(`examples/${name}`), name);
});
