// Checks an AsyncAPI document, and prints what the parser finds: node asyncapi.mjs FILE
// Anything but a hint fails.
import { readFile } from "node:fs/promises";
import { DiagnosticSeverity, Parser } from "@asyncapi/parser";

const file = process.argv[2];
const { document, diagnostics } = await new Parser().parse(await readFile(file, "utf8"), { source: file });
const faults = diagnostics.filter(({ severity }) => severity <= DiagnosticSeverity.Warning);
for (const { message, path, range } of faults) {
  console.error(`${file}:${range.start.line + 1}: ${message} (${path.join(".")})`);
}
if (!document || faults.length > 0) process.exit(1);
console.log(`${file}: ${document.messages().all().length} messages, ${diagnostics.length} hints`);
