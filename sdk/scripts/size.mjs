// Fails when what a page loads has grown too large: all of the package, minified and compressed.
import { build } from "esbuild";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const limit = 10 * 1024;
const dist = join(dirname(fileURLToPath(import.meta.url)), "..", "dist", "esm");

async function size(source) {
  const { outputFiles } = await build({
    stdin: { contents: source, resolveDir: dist },
    bundle: true,
    minify: true,
    format: "esm",
    platform: "browser",
    target: "es2022",
    write: false,
    logLevel: "error",
  });
  return gzipSync(outputFiles[0].contents, { level: 9 }).length;
}

const all = await size('export * from "./index.js"; export * from "./compat.js";');
const one = await size('export { latest } from "./index.js";');
console.log(`everything: ${all} bytes gzipped of at most ${limit}; latest alone: ${one}`);
if (all > limit) throw new Error(`the package has ${all} bytes gzipped: at most ${limit} are allowed`);
if (one > limit / 5) throw new Error(`latest alone brings ${one} bytes: the package cannot be taken apart`);
