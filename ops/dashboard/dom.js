// Elements, and how figures become text. All text from the hub becomes text nodes: no view builds
// markup from strings.

/** el makes an element. Strings among the children become text. */
export function el(name, props = {}, ...children) {
  return fill(document.createElement(name), props, children);
}

/** svg makes an element of a drawing. */
export function svg(name, props = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), props, children);
}

function fill(e, props, children) {
  e.handlers = {};
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) listen(e, key.slice(2), value);
    else if (key === "key") e.key = value; // names the element among its siblings; see update
    else e.setAttribute(key, value === true ? "" : String(value));
  }
  e.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return e;
}

/** listen has one listener call the element's present handler, which update may replace. */
function listen(e, type, handler) {
  if (!e.handlers[type]) e.addEventListener(type, (event) => e.handlers[type]?.(event));
  e.handlers[type] = handler;
}

/**
 * update makes an element like another one, and keeps what both have: the focus, the scrolling,
 * what is selected and what is typed stay, and a click that began before ends where it began.
 */
export function update(old, fresh) {
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.handlers && fresh.handlers) {
    for (const type of Object.keys(old.handlers)) {
      if (!fresh.handlers[type]) old.handlers[type] = undefined;
    }
    for (const [type, handler] of Object.entries(fresh.handlers)) listen(old, type, handler);
  }
  updateChildren(old, [...fresh.childNodes]);
}

/** updateChildren gives an element children, and keeps those that it has of the same key or kind. */
export function updateChildren(parent, fresh) {
  const keyed = new Map();
  const others = [];
  for (const child of parent.childNodes) {
    if (child.key !== undefined) keyed.set(child.key, child);
    else others.push(child);
  }
  let at = parent.firstChild;
  for (const child of fresh) {
    let have;
    if (child.key !== undefined) have = keyed.get(child.key);
    else {
      const i = others.findIndex((o) => o.nodeName === child.nodeName && o.className?.toString() === child.className?.toString());
      if (i >= 0) have = others.splice(0, i + 1).at(-1);
    }
    if (have && have.nodeName !== child.nodeName) have = undefined;
    if (!have) {
      parent.insertBefore(settled(child), at);
      continue;
    }
    if (have === at) at = at.nextSibling;
    else parent.insertBefore(have, at);
    if (have === (child.real ?? child)) continue;
    if (have.nodeType !== Node.TEXT_NODE) update(have, child);
    else if (have.data !== child.data) have.data = child.data;
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

/** settled is an element with what stands in for others (their real) replaced by them. */
export function settled(e) {
  if (e.real) return e.real;
  e.querySelectorAll?.("figure").forEach((f) => f.real && f.replaceWith(f.real));
  return e;
}

export const $ = (id) => document.getElementById(id);
export const enc = encodeURIComponent;

// --- Figures as text ----------------------------------------------------------------------------

const decimal = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });
export const none = "–";
export const count = (n) => (n === undefined || n === null ? none : decimal.format(n));
/** counted is a number of things, such as "1 event" and "2 events". */
export const counted = (n, thing) => `${count(n)} ${thing}${n === 1 ? "" : "s"}`;
export const perSecond = (n) => (n === undefined || n === null ? none : `${decimal.format(n)}/s`);

export function bytes(n) {
  if (n === undefined || n === null) return none;
  if (n < 0) return "no limit";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${decimal.format(n)} ${units[i]}`;
}

export function span(ms) {
  if (ms === undefined || ms === null) return none;
  if (ms < 1) return `${decimal.format(ms)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const s = ms / 1000;
  if (s < 120) return `${decimal.format(s)} s`;
  if (s < 7200) return `${decimal.format(s / 60)} min`;
  if (s < 172800) return `${decimal.format(s / 3600)} h`;
  return `${decimal.format(s / 86400)} d`;
}

const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const dated = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

/** when shows a moment by the clock of the browser, with the date unless it is today. */
export function when(ms) {
  if (!ms) return el("span", { class: "soft" }, none);
  const at = new Date(ms);
  if (Number.isNaN(at.getTime())) return String(ms);
  const today = at.toDateString() === new Date().toDateString();
  const utc = at.toISOString().replace("T", " ").replace("Z", " UTC");
  return el("time", { datetime: at.toISOString(), title: utc }, (today ? clock : dated).format(at));
}

// --- Parts of views -----------------------------------------------------------------------------

let captions = 0;

/**
 * table makes a table. columns are [title, cell(row), kind, help]: kind is "n" for numbers, "text"
 * for long text and "do" for buttons. key(row) names a row.
 */
export function table(caption, columns, rows, empty, key) {
  const head = el("tr", { role: "row" }, columns.map(([title, , kind, help]) => (title
    ? el("th", { scope: "col", role: "columnheader", class: kind, title: help }, title)
    : el("td", { role: "cell", class: kind }))));
  const body = rows.map((row) => el("tr", { role: "row", key: key?.(row) }, columns.map(([title, cell, kind, help]) => (
    el("td", { role: "cell", class: kind, "data-title": title || undefined, title: help }, el("div", {}, cell(row)))))));
  if (!rows.length) body.push(el("tr", { role: "row" }, el("td", { role: "cell", class: "none", colspan: columns.length }, empty)));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": `${caption}, table` }, el("table", { role: "table" },
    el("caption", { class: "unseen" }, caption), el("thead", { role: "rowgroup" }, head), el("tbody", { role: "rowgroup" }, body)));
}

/** tile shows a figure. help says in the title what it means. */
export const tile = (name, value, help) => el("div", { class: "tile", title: help }, el("dt", {}, name), el("dd", {}, value));
export const tiles = (...all) => el("dl", { class: "tiles" }, all);
export const button = (text, onclick, kind, help) => el("button", { type: "button", class: kind, onclick, title: help }, text);
export const buttons = (...all) => el("div", { class: "row" }, all);
export const field = (name, input) => el("label", {}, name, input);
export const options = (all, chosen) => all.map(([value, text]) => el("option", { value, selected: value === chosen }, text));
export const note = (...text) => el("p", { class: "soft" }, text);
export const state = (text, kind, title) => el("span", { class: `mark ${kind}`, title }, text);
export const topicLink = (t) => el("a", { href: `#/topics/${enc(t)}` }, t);
export const groupLink = (t, g) => el("a", { href: `#/groups/${enc(t)}/${enc(g)}` }, g);

export function say(text, bad) {
  const p = el("p", { class: bad ? "bad" : "" }, el("span", {}, text), button("×", () => p.remove(), "", "Hide this message"));
  p.querySelector("button").setAttribute("aria-label", "Hide this message");
  $("said").append(p);
  if ($("said").children.length > 3) $("said").firstChild.remove();
  setTimeout(() => p.remove(), bad ? 15000 : 8000);
}

/** copied copies a text, and says so. */
export const copied = (text) => navigator.clipboard.writeText(text).then(() => say("Copied."), () => say("The browser does not allow copying.", true));

export const pretty = (value) => el("pre", { tabindex: "0" }, JSON.stringify(value, null, 2));

export function short(value) {
  const text = JSON.stringify(value) ?? "";
  return text.length > 160 ? `${text.slice(0, 160)}…` : text;
}

// --- Dialogs ------------------------------------------------------------------------------------

/** dialog shows a form, and resolves with its values, or with null when it was cancelled. */
export function dialog(title, content, { yes = "OK", no = "Cancel", danger = false } = {}) {
  const box = $("dialog");
  return new Promise((resolve) => {
    const end = (values) => {
      box.close();
      box.replaceChildren();
      resolve(values);
    };
    const form = el("form", {
      onsubmit: (e) => {
        e.preventDefault();
        end(e.submitter?.value === "no" ? null : Object.fromEntries(new FormData(form)));
      },
    }, el("h2", { id: "dialog-title" }, title), content,
    el("div", { class: "row end" },
      no ? el("button", { type: "submit", value: "no", formnovalidate: true }, no) : null,
      el("button", { type: "submit", value: "yes", class: danger ? "danger" : "main" }, yes)));
    // The browser takes the first button for the Enter key, which must not be Cancel.
    form.addEventListener("keydown", (e) => {
      if (e.key !== "Enter" || e.target.tagName !== "INPUT") return;
      e.preventDefault();
      form.requestSubmit(form.querySelector("button[value=yes]"));
    });
    box.oncancel = (e) => { // the Escape key
      e.preventDefault();
      end(null);
    };
    box.replaceChildren(form);
    box.showModal();
  });
}

/** shown shows a value. */
export const shown = (title, value) => dialog(title, [pretty(value), buttons(button("Copy", () => copied(JSON.stringify(value, null, 2))))], { yes: "Close", no: null });

/** confirmed asks before something is changed. With a name, the operator types it. */
export async function confirmed(title, text, yes, name) {
  const content = [el("p", {}, text)];
  if (name !== undefined) {
    const input = el("input", { name: "typed", required: true, autocomplete: "off", spellcheck: "false" });
    const check = () => input.setCustomValidity(input.value === name ? "" : "This is not the name.");
    input.addEventListener("input", check);
    check();
    content.push(el("p", {}, "This cannot be undone. Type ", el("code", {}, name), " to confirm."), field("Name", input));
  }
  return (await dialog(title, content, { yes, danger: true })) !== null;
}
