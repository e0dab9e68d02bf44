// Elements. All text from the hub becomes text nodes: nothing builds markup from strings.

export const $ = (id) => document.getElementById(id);

/** el makes an element. Strings among the children become text. */
export function el(name, props = {}, ...children) {
  const e = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === false) continue;
    if (key.startsWith("on")) e.addEventListener(key.slice(2), value);
    else e.setAttribute(key, value === true ? "" : String(value));
  }
  e.append(...children.flat().filter((child) => child !== undefined));
  return e;
}

/** write sets the text of an element, if it differs. */
export function write(e, text) {
  if (e.textContent !== text) e.textContent = text;
}

/** short is a value as JSON, cut off where it is long. */
export function short(value) {
  const text = JSON.stringify(value) ?? "";
  return text.length > 160 ? `${text.slice(0, 160)}…` : text;
}

const words = { ready: "connected", waiting: "reconnecting", failed: "disconnected", closed: "closed" };

/** showState shows the state of a connection. */
export function showState(e, state) {
  write(e, words[state] ?? "connecting");
  e.className = `mark ${state === "ready" ? "good" : state === "failed" || state === "waiting" ? "bad" : ""}`;
}
