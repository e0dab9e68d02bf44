// Requests to the hub that serves the page, and to nothing else.

import { button, dialog, el, field, say } from "./dom.js";

/** Refused is an answer of the hub that is an error. */
export class Refused extends Error {
  constructor(status, body) {
    super(body.error ?? `The hub answered with ${status}.`);
    this.status = status;
    this.code = body.code;
  }
}

export const token = () => sessionStorage.getItem("token") ?? "";

/** ask sends a request to the hub and returns its answer. Segments of the path are encoded. */
export async function ask(path, { method = "GET", query, body, signal } = {}) {
  if (path.some((segment) => segment === "." || segment === "..")) {
    throw new Refused(400, { error: "A browser cannot ask about a name like this: use eventhub group on the command line.", code: "bad_options" });
  }
  const url = new URL(path.map(encodeURIComponent).join("/"), document.baseURI);
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  const headers = {};
  if (token()) headers.Authorization = `Bearer ${token()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(url, {
    method, headers, signal: signal ?? AbortSignal.timeout(25000), body: body === undefined ? undefined : JSON.stringify(body),
  });
  const text = await answer.text();
  let said = {};
  try {
    said = text ? JSON.parse(text) : {};
  } catch {
    said = { error: text.slice(0, 300) };
  }
  if (!answer.ok) throw new Refused(answer.status, said ?? {});
  return said;
}

const AGAIN_MS = 2000; // how long after the end of a stream the next one begins

/**
 * follow calls on(name, data) for the newest events of a topic and for each that comes, until the
 * signal. Names are those of server-sent events, and "away" when the hub does not answer. A new
 * stream goes on where one has ended. follow ends with Refused when the hub refuses.
 */
export async function follow(topic, history, on, signal) {
  for (let last; !signal.aborted; await rest(AGAIN_MS, signal)) {
    const url = new URL(`follow/${encodeURIComponent(topic)}`, document.baseURI);
    const headers = {};
    if (token()) headers.Authorization = `Bearer ${token()}`;
    if (last) headers["Last-Event-ID"] = last;
    else url.searchParams.set("history", history);
    let answer;
    try {
      answer = await fetch(url, { headers, signal });
      if (answer.ok) await eachMessage(answer.body.pipeThrough(new TextDecoderStream()), ({ event, data, id }) => {
        last = id ?? last;
        on(event, JSON.parse(data));
      });
    } catch (err) {
      if (signal.aborted) return;
      if (!(err instanceof TypeError || err instanceof DOMException)) throw err; // those say that it was cut
    }
    if (answer && !answer.ok && answer.status !== 429 && answer.status !== 503) throw new Refused(answer.status, await answer.json().catch(() => ({})));
    on("away");
  }
}

/** eachMessage calls on for each server-sent event of a stream of text. The hub ends lines with \n. */
async function eachMessage(stream, on) {
  let text = "";
  for await (const part of stream) {
    text += part;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const fields = Object.fromEntries(text.slice(0, end).split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
      if (fields.data) on(fields);
    }
  }
}

const rest = (ms, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, ms);
  signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});

/** maybe is ask for what the token may not be allowed to see: it resolves with the error then. */
export const maybe = (path, options) => ask(path, options).catch((err) => {
  if (err instanceof Refused) return err;
  throw err;
});

let renew = () => {};

/** onChange sets what shows the view again after a change. */
export function onChange(f) {
  renew = f;
}

export const changed = () => renew();

/** act carries out what an operator asked for, says what it did, and shows the view again. */
export async function act(what, does) {
  try {
    const said = await does();
    say(said ?? `${what}: done.`);
  } catch (err) {
    say(`${what}: ${err.message}`, true);
  }
  renew();
}

export async function askForToken() {
  const values = await dialog("Token", [
    el("p", {}, "Totals on loopback need no token. Everything else does: paste a token, such as the content of ", el("code", {}, "eventhub-data/token"), "."),
    el("p", { class: "soft" }, "The token stays in this tab, until the tab is closed. An empty field removes it."),
    field("Token", el("input", { name: "token", type: "password", autocomplete: "off", value: token() })),
  ], { yes: "Use" });
  if (!values) return;
  const given = values.token.trim();
  if (given) sessionStorage.setItem("token", given);
  else sessionStorage.removeItem("token");
  showToken();
  renew();
}

/** showToken says on the button whether there is a token. */
export function showToken() {
  const b = document.getElementById("token");
  b.classList.toggle("given", Boolean(token()));
  b.title = token() ? "This tab has a token: change or remove it" : "Give this tab a token";
  b.setAttribute("aria-label", token() ? "Token: this tab has one" : "Token: this tab has none");
}

/** refusal is what a view shows instead of what the hub refused. */
export function refusal(err) {
  if (err.status === 401 || err.status === 403) {
    return [el("p", {}, err.status === 401 ? "This view needs a token." : "The token does not allow this view."), el("p", { class: "soft" }, err.message), button("Set the token", askForToken, "main")];
  }
  return el("p", { class: "bad" }, err.message);
}
