// Compiles a program in Sibilant to an ES module, on standard output: node compile.mjs FILE
//
// Sibilant takes a macro that is misspelt, or not included, for a function. Here, a name that
// nothing declares is an error.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, resolve } from "node:path";

const sibilant = createRequire(import.meta.url)("sibilant");
const fromSdk = createRequire(new URL("../package.json", import.meta.url));
const ts = fromSdk("typescript");

const [file] = process.argv.slice(2);
try {
  if (!file) throw "which file? Write: node compile.mjs FILE";
  const { js } = sibilant({ file: resolve(file) });
  const unknown = undeclared(js);
  if (unknown.length > 0) throw `nothing declares ${unknown.join(", ")}: a macro may be misspelt or not included`;
  process.stdout.write(js + "\n");
} catch (error) {
  console.error(`${basename(file ?? "compile.mjs")}: ${error.message ?? error}`);
  process.exitCode = 1;
}

/** The names that a module uses and that neither it nor Node nor browsers declare. */
function undeclared(js) {
  const name = "program.js";
  const options = { allowJs: true, checkJs: true, noEmit: true, noLib: true, noResolve: true, types: [], target: ts.ScriptTarget.ES2022 };
  const host = ts.createCompilerHost(options);
  host.getSourceFile = (path) => (path === name ? ts.createSourceFile(path, js, options.target) : undefined);
  const program = ts.createProgram([name], options, host);
  const cannotFind = new Set([2304, 2552, 2580, 2583, 2584, 2591]);
  const names = program
    .getSemanticDiagnostics(program.getSourceFile(name))
    .filter(({ code }) => cannotFind.has(code))
    .map(({ start, length }) => js.slice(start, start + length));
  const dom = readFileSync(fromSdk.resolve("typescript/lib/lib.dom.d.ts"), "utf8");
  const ofBrowsers = [...dom.matchAll(/^declare (?:var|function|const) (\w+)/gm)].map(([, one]) => one);
  const known = new Set([...Object.getOwnPropertyNames(globalThis), ...ofBrowsers, "arguments", "require", "exports", "module"]);
  return [...new Set(names)].filter((one) => !known.has(one));
}
