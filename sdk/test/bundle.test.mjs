import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { bundle, bundleFile } from "../scripts/bundle.mjs";

test("the module of the hub's demo is what these sources make", async () => {
  const made = Buffer.from(await bundle());
  assert.ok(made.equals(readFileSync(bundleFile)), "run npm run bundle in sdk/, and commit cmd/eventhub/demo/eventhub.js");
});
