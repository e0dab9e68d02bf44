// Checks the package as users get it: its types, its size, and how Node and bundlers find its
// parts.
import { execFileSync } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const root = join(dirname(fileURLToPath(import.meta.url)), "..");
const run = (program, ...args) => execFileSync(program, args, { cwd: root, stdio: "inherit" });

run("tsc", "-p", "test");
run(process.execPath, "scripts/size.mjs");
run("publint", "--strict");
const dir = mkdtempSync(join(tmpdir(), "eventhub-pack-"));
try {
  execFileSync("npm", ["pack", "--silent", "--ignore-scripts", "--pack-destination", dir], { cwd: root });
  const [archive] = readdirSync(dir);
  run("attw", join(dir, archive), "--no-emoji", "--format", "ascii");
} finally {
  rmSync(dir, { recursive: true });
}
