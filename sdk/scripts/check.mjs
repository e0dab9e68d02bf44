// Checks the package as users get it: its types, its size, and how Node and bundlers find its
// parts. The checks run at the same time.
import { execFile } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

const root = join(dirname(fileURLToPath(import.meta.url)), "..");

/** Runs a program; what it prints is shown at its end, also if it fails. */
async function run(program, ...args) {
  const ended = await promisify(execFile)(program, args, { cwd: root }).catch((error) => error);
  process.stdout.write(`${ended.stdout}${ended.stderr}`);
  if (ended instanceof Error) throw new Error(ended.message.split("\n")[0]);
}

/** How resolvers find the types in the archive that users get. */
async function packed(dir) {
  await run("npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", dir);
  const [archive] = readdirSync(dir);
  await run("attw", join(dir, archive), "--no-emoji", "--format", "ascii");
}

const dir = mkdtempSync(join(tmpdir(), "eventhub-pack-"));
try {
  const checks = [run("tsc", "-p", "test"), run(process.execPath, "scripts/size.mjs"), run("publint", "--strict"), packed(dir)];
  const failed = (await Promise.allSettled(checks)).filter(({ status }) => status === "rejected").map(({ reason }) => reason.message);
  if (failed.length > 0) throw new Error(failed.join("\n"));
} finally {
  rmSync(dir, { recursive: true });
}
