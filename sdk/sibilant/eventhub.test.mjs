// What the macros make, run against a real hub.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { connect } from "../dist/esm/index.js";
import { startHub } from "../test/hub.mjs";
import { jwt, secret } from "../test/jwt.mjs";

const here = fileURLToPath(new URL(".", import.meta.url));
const read = (name) => readFileSync(join(here, name), "utf8");
let hub, dir;
before(async () => {
  dir = mkdtempSync(join(tmpdir(), "eventhub-sibilant-"));
  hub = await startHub([], { JWT_SECRET: secret, WS_TOKEN: "the hub's own token" });
});
after(async () => {
  rmSync(dir, { recursive: true });
  await hub.stop();
});

/** Runs Node in a directory, with something on its standard input. */
async function node(args, { input = "", cwd = here, env = {} } = {}) {
  const child = spawn(process.execPath, args, { cwd, env: { ...process.env, ...env } });
  const said = { out: "", err: "" };
  child.stdout.on("data", (data) => (said.out += data));
  child.stderr.on("data", (data) => (said.err += data));
  child.stdin.end(input);
  const [code] = await once(child, "close");
  return { code, ...said };
}

/** Compiles a program once, in a process of its own, as macros stay in the compiler. */
const outputs = {};
const compiled = (path) =>
  (outputs[path] ??= node(["compile.mjs", path]).then(({ code, out, err }) => {
    assert.equal(code, 0, err);
    return out;
  }));

/** Compiles text that stands beside the macros. */
function compile(name, text) {
  writeFileSync(join(dir, name), text.replace("./eventhub", join(here, "eventhub")));
  return node(["compile.mjs", join(dir, name)]);
}

const macros = [...read("eventhub.sibilant").matchAll(/^\(macro (\S+)/gm)].map(([, name]) => (name === "scopes-" ? "scopes->policy" : name));
const programs = ["example.sibilant", "acl.sibilant"];

test("there are at most 60 lines", () => assert.ok(read("eventhub.sibilant").trimEnd().split("\n").length <= 60));

test("every macro is used by a program, and explained", () => {
  const wanted = ["define-topic", "publish!", "subscribe!", "on-event", "allow", "deny", "policy", "scopes->policy", "with-ws-bus", "defn"];
  assert.deepEqual(wanted.filter((name) => !macros.includes(name)), []);
  const used = programs.map(read).join("");
  for (const name of wanted) {
    assert.ok(used.includes(`(${name} `), name);
    assert.ok(read("README.md").includes(`(${name} `), name);
  }
});

for (const name of programs) {
  test(`${name}: every macro is expanded`, async () => {
    const js = await compiled(name);
    const inJs = (macro) => macro.replace("!", "__BANG").replace(/-(>?)(\w)/g, (_, arrow, letter) => letter.toUpperCase());
    for (const macro of macros) assert.equal(new RegExp(`(?<![\\w.])${inJs(macro)}\\s*\\(`).test(js), false, macro);
    assert.doesNotMatch(js, /__BANG|__QUERY/);
  });
}

test("a macro that is misspelt or not included is an error", async () => {
  const [misspelt, absent, arrow] = await Promise.all([
    compile("misspelt.sibilant", '(include "./eventhub")\n(publissh! hub "t" 1)'),
    compile("absent.sibilant", '(console.log (policy (allow "publish" "a")))'),
    compile("arrow.sibilant", '(include "./eventhub")\n(scopes->polcy ["publish:a"])'),
  ]);
  assert.deepEqual([misspelt.code, misspelt.out], [1, ""]);
  assert.match(misspelt.err, /^misspelt.sibilant: nothing declares publissh__BANG, hub: a macro may be misspelt or not included\n$/);
  assert.match(absent.err, /nothing declares policy, allow:/);
  assert.match(arrow.err, /there is no macro scopes->polcy/);
});

test("example.sibilant prints what it says", async () => {
  const js = await compiled("example.sibilant");
  const env = { EVENTHUB_URL: hub.websocket, EVENTHUB_TOKEN: hub.token };
  // In the directory of the package, where Node finds eventhub-client.
  const { code, out, err } = await node(["--input-type=module", "-"], { input: js, cwd: join(here, ".."), env });
  assert.equal(code, 0, err);
  const wanted = [...read("example.sibilant").matchAll(/^; Prints: (.*)$/gm)].map(([, line]) => line);
  assert.deepEqual(out.trim().split("\n").sort(), wanted.sort());
});

// -- policies

async function acl() {
  const exports = {};
  new Function("exports", await compiled("acl.sibilant"))(exports);
  return exports;
}

/** What a hub answers to requests of a token: OK, or a code. */
async function answers(token, asks) {
  const client = await connect(hub.websocket, { token });
  const got = [];
  for (const [action, topic, group] of asks) {
    const asked = action === "publish" ? client.publish(topic, 1) : client.subscribe(topic, group, () => {});
    got.push(`${action} ${topic}${group ? ` ${group}` : ""}: ${await asked.then(() => "OK", (error) => error.code)}`);
  }
  await client.close();
  return got;
}

test("a hub enforces what policy, allow and deny make", async () => {
  const { rules } = await acl();
  const asks = [
    ["publish", "orders.placed", ""],
    ["publish", "bills", ""],
    ["publish", "orders.secret", ""],
    ["publish", "orders.a.b", ""],
    ["publish", "other", ""],
    ["subscribe", "orders.placed", "mailer"],
    ["subscribe", "orders.placed", "thief"],
    ["subscribe", "orders.secret", "mailer"],
    ["subscribe", "bills", "mailer"],
    ["publish", "open.a.b", ""],
    ["subscribe", "open.a.b", "any"],
  ];
  assert.deepEqual(await answers(jwt(undefined, 3600, { policy: rules }), asks), [
    "publish orders.placed: OK",
    "publish bills: OK",
    "publish orders.secret: forbidden",
    "publish orders.a.b: forbidden",
    "publish other: forbidden",
    "subscribe orders.placed mailer: OK",
    "subscribe orders.placed thief: forbidden",
    "subscribe orders.secret mailer: forbidden",
    "subscribe bills mailer: forbidden",
    "publish open.a.b: OK",
    "subscribe open.a.b any: OK",
  ]);
});

test("scopes->policy says what the scopes say", async () => {
  const { scopes, fromScopes } = await acl();
  const asks = [
    ["publish", "heartbeat.received", ""],
    ["publish", "heartbeat.a.b", ""],
    ["publish", "process.state", ""],
    ["subscribe", "process.a.b", "g"],
    ["subscribe", "process", "g"],
    ["subscribe", "process.a", "process-projector"],
    ["subscribe", "heartbeat.received", "g"],
    ["subscribe", "orders.placed", "mailer"],
    ["subscribe", "orders.placed", "thief"],
    ["subscribe", "any.x", "whatever"],
  ];
  const [byPolicy, byScopes] = [await answers(jwt(undefined, 3600, { policy: fromScopes }), asks), await answers(jwt(scopes), asks)];
  assert.deepEqual(byPolicy, byScopes);
  assert.deepEqual(byPolicy.map((line) => line.split(": ")[1]), ["OK", "forbidden", "forbidden", "OK", "OK", "forbidden", "forbidden", "OK", "forbidden", "OK"]);
});

test("scopes->policy widens nothing: it refuses what no rule expresses, and a hub what is malformed", async () => {
  const { convert } = await acl();
  assert.deepEqual(convert([]), { rules: [] });
  const malformed = ["publish", "read:a", "publish:", ":a", "subscribe:a::", "publish:a::g", "*:a::g", "admin:a:b", "subscribe:a:::g"];
  for (const scope of [...malformed, "subscribe:a::tab-*"]) assert.throws(() => convert(["publish:a", scope]), { message: `no rule can express the scope ${scope}` });
  for (const scope of malformed) await assert.rejects(connect(hub.websocket, { token: jwt([scope]) }), { code: "jwt_invalid" }, scope);
  // A pattern is for the hub to check, which refuses the token.
  for (const scope of ["publish:a..b", "publish:a\n"]) {
    await assert.rejects(connect(hub.websocket, { token: jwt(undefined, 3600, { policy: convert([scope]) }) }), { code: "jwt_invalid" });
  }
});
