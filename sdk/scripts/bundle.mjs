// Makes the module that the hub serves with its demo, minified and without a source map. Run as a
// program, it writes the file; a test compares the file with what it would write.
import { build } from "esbuild";
import { writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const root = join(dirname(fileURLToPath(import.meta.url)), "..");

/** A module for browsers, of what tsc has compiled. */
export async function minified(source) {
  const { outputFiles } = await build({
    stdin: { contents: source, resolveDir: join(root, "dist", "esm") },
    bundle: true,
    minify: true,
    format: "esm",
    platform: "browser",
    target: "es2022",
    write: false,
    logLevel: "error",
  });
  return outputFiles[0].contents;
}

/** Where the hub has the module. */
export const bundleFile = join(root, "..", "cmd", "eventhub", "demo", "eventhub.js");

export const bundle = () => minified('export { createClient } from "./index.js"; export { watch } from "./broadcast.js";');

if (process.argv[1] === fileURLToPath(import.meta.url)) writeFileSync(bundleFile, await bundle());
