// Lists with pages, and filters above them.

import { button, buttons } from "./dom.js";
import { changed } from "./hub.js";

export const PAGE = 100; // rows of a page

const pages = new Map(); // view to where its present page and those before it begin

/** at is where the present page of a view begins; undefined for the first one. */
export const at = (view) => pages.get(view)?.at(-1);

export const firstPages = () => pages.clear();

export function restart(view) {
  pages.delete(view);
}

/** pager has the buttons of a list with pages. */
export function pager(view, next) {
  const before = pages.get(view) ?? [];
  if (!before.length && !next) return null;
  return buttons(
    before.length ? button("Previous page", () => { pages.set(view, before.slice(0, -1)); changed(); }) : null,
    before.length ? `Page ${before.length + 1}` : null,
    next ? button("Next page", () => { pages.set(view, [...before, next]); changed(); }) : null,
  );
}

/** cut returns the present page of rows that came all at once, and where the next one begins. */
export function cut(view, rows) {
  const from = Number(at(view) ?? 0);
  return { rows: rows.slice(from, from + PAGE), next: from + PAGE < rows.length ? String(from + PAGE) : undefined };
}
