// Fails when what a page loads has grown too large: all of the package, minified and compressed.
import { gzipSync } from "node:zlib";
import { minified } from "./bundle.mjs";

const limit = 10 * 1024;
const castLimit = 3 * 1024; // an entry of its own, which most pages do not load
const size = async (source) => gzipSync(await minified(source), { level: 9 }).length;

const all = await size('export * from "./index.js"; export * from "./compat.js";');
const casts = (await size('export * from "./index.js"; export * from "./broadcast.js";')) - (await size('export * from "./index.js";'));
const one = await size('export { latest } from "./index.js";');
console.log(`everything: ${all} bytes gzipped of at most ${limit}; broadcasts add ${casts} of at most ${castLimit}; latest alone: ${one}`);
if (all > limit) throw new Error(`the package has ${all} bytes gzipped: at most ${limit} are allowed`);
if (casts > castLimit) throw new Error(`broadcasts add ${casts} bytes: at most ${castLimit} are allowed`);
if (one > limit / 5) throw new Error(`latest alone brings ${one} bytes: the package cannot be taken apart`);
