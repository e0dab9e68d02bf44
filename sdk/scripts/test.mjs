// Runs the tests against a hub that is built from this repository, unless EVENTHUB names one.
import { spawn, execFileSync } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const root = join(dirname(fileURLToPath(import.meta.url)), "..");
const dir = mkdtempSync(join(tmpdir(), "eventhub-sdk-"));
let program = process.env.EVENTHUB;
if (!program) {
  program = join(dir, "eventhub");
  execFileSync("go", ["build", "-o", program, "./cmd/eventhub"], { cwd: join(root, ".."), stdio: "inherit" });
}
const files = process.argv.length > 2 ? process.argv.slice(2) : readdirSync(join(root, "test")).filter((f) => f.endsWith(".test.mjs")).map((f) => join("test", f));
const reporter = process.env.CI ? "tap" : "spec";
// Most tests wait rather than compute.
const child = spawn(process.execPath, ["--test", "--test-concurrency=6", `--test-reporter=${reporter}`, "--test-timeout=300000", ...files], {
  cwd: root,
  stdio: "inherit",
  env: { ...process.env, EVENTHUB: program },
});
child.on("exit", (code, signal) => {
  rmSync(dir, { recursive: true });
  process.exit(signal ? 1 : code);
});
