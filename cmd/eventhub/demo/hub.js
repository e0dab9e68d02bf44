// Connections to the hub that serves this page, and the token for them.

import { createClient } from "./eventhub.js";
import { $, write } from "./dom.js";

const url = new URL("./", location.href).href.replace(/^http/, "ws");
const FETCH_MS = 10_000;
const VISITOR_MS = 24 * 3_600_000; // how long a visitor may take to give a token
const refusals = ["bad_token", "jwt_invalid", "no_token"];

/** The tab's token, if the visitor gave one. */
const own = () => sessionStorage.getItem("token");

/**
 * token is asked for each connection. On loopback the hub has a token for this page, another one
 * after each start. Elsewhere the visitor gives one.
 */
async function token() {
  if (own()) return own();
  const answer = await fetch("token", { signal: AbortSignal.timeout(FETCH_MS) });
  if (answer.ok) return (await answer.json()).token;
  if (answer.status !== 403) throw new Error(`the hub answered with ${answer.status}`);
  return askForToken();
}

let asking;

/** askForToken shows the form until the visitor has given a token. */
function askForToken() {
  asking ??= new Promise((resolve) => {
    const form = $("ask");
    form.hidden = false;
    form.elements.token.focus();
    form.onsubmit = (e) => {
      e.preventDefault();
      const given = form.elements.token.value.trim();
      if (!given) return;
      sessionStorage.setItem("token", given);
      form.reset();
      form.hidden = true;
      asking = undefined;
      resolve(given);
    };
  });
  return asking;
}

/** open makes a connection. A token that the hub refuses is forgotten. */
export function open() {
  const client = createClient(url, { token, maxPauseMs: 5_000, tokenTimeoutMs: VISITOR_MS });
  client.on("state", (state, error) => {
    if ((state !== "waiting" && state !== "failed") || !refusals.includes(error?.code)) return;
    sessionStorage.removeItem("token");
    write($("refused"), error.message);
    if (state === "failed") askForToken().then(() => location.reload());
  });
  return client;
}
