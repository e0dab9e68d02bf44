// The history of figures while the page is open, and plots of it.

import { count, el, svg } from "./dom.js";

const HISTORY = 450; // points of a figure: 15 minutes at a point every two seconds
const MAX_SERIES = 400; // figures whose history is kept; the one that was noted longest ago goes first
const SHORTEST = 120; // seconds that a plot spans at least

const series = new Map(); // name to [[seconds…], [values…]]

/** record adds a point to the history of a figure. */
export function record(name, value) {
  const s = series.get(name) ?? [[], []];
  series.delete(name);
  series.set(name, s);
  if (series.size > MAX_SERIES) series.delete(series.keys().next().value);
  s[0].push(Date.now() / 1000);
  s[1].push(value);
  if (s[0].length > HISTORY) {
    s[0].shift();
    s[1].shift();
  }
}

const last = new Map(); // name to the total that was seen last, and when

/** rate turns a total into a rate by the second, and records it. */
export function rate(name, total) {
  const before = last.get(name);
  const now = performance.now();
  last.set(name, [total, now]);
  if (!before || now === before[1]) return undefined;
  const value = Math.max(0, ((total - before[0]) * 1000) / (now - before[1]));
  record(name, value);
  return value;
}

/** forgetTotals is for a hub that was started again: its totals begin at 0. */
export const forgetTotals = () => last.clear();

const plots = new Map(); // caption to the plot that is shown
let made = 0; // plots so far
const whole = [1, 2, 5].flatMap((n) => [n, n * 10, n * 100, n * 1e3, n * 1e4, n * 1e5, n * 1e6, n * 1e7]).sort((a, b) => a - b);

/** plot shows the history of figures: [name, label]. With format, values have a unit. */
function plot(caption, names, format) {
  const style = getComputedStyle(document.documentElement);
  const colors = [1, 2, 3, 4, 5].map((i) => style.getPropertyValue(`--plot-${i}`).trim());
  const soft = style.getPropertyValue("--soft");
  const line = style.getPropertyValue("--line");
  const holder = el("div", { role: "img", "aria-label": `Plot: ${caption}` });
  const figure = el("figure", { key: `${caption} ${++made}` }, el("figcaption", {}, caption), holder);
  const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif" };
  const data = () => uPlot.join(names.map(([name]) => series.get(name) ?? [[], []]));
  const latest = (u, i) => u.data[i].findLast((v) => v !== null && v !== undefined);
  const time = (seconds, long) => new Date(seconds * 1000).toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", second: long ? "2-digit" : undefined });
  const p = new uPlot({
    width: 400, height: 190, cursor: { y: false, points: { size: 6 } },
    scales: { x: { range: (_, min, max) => [Math.min(min, max - SHORTEST), max] }, y: { range: (_, __, max) => [0, Math.max(1, max * 1.1)] } },
    axes: [
      { ...axis, space: 70, incrs: [5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600], values: (_, all, __, ___, step) => all.map((s) => time(s, step < 60)) },
      { ...axis, size: 64, incrs: whole, values: (_, all) => all.map((v) => format(v)) },
    ],
    legend: { markers: { width: 2 } },
    series: [{ label: "at", value: (u, v) => (v === null || v === undefined ? "now" : time(v, true)) }, ...names.map(([, label], i) => ({
      label, stroke: colors[i % colors.length], width: 2, dash: i > 1 ? [7, 4] : undefined, spanGaps: true, points: { show: false },
      value: (u, v, at, hovered) => format(hovered === null || hovered === undefined ? latest(u, at) : v),
    }))],
  }, data(), holder);
  const fit = new ResizeObserver(() => p.setSize({ width: Math.max(200, holder.clientWidth), height: 190 }));
  fit.observe(holder);
  plots.set(caption, { figure, names: names.join(), renew: () => p.setData(data()), end: () => { fit.disconnect(); p.destroy(); } });
  return figure;
}

/** plotted returns a plot that the view has already, or makes it. */
export function plotted(caption, names, format = count) {
  const have = plots.get(caption);
  if (have?.names === names.join()) {
    have.renew();
    const standIn = el("figure", { key: have.figure.key });
    standIn.real = have.figure;
    return standIn;
  }
  have?.end();
  return plot(caption, names, format);
}

export function endPlots() {
  plots.forEach((p) => p.end());
  plots.clear();
}

/** spark is a small plot of a figure's last points. */
export function spark(name, what) {
  const values = (series.get(name)?.[1] ?? []).slice(-60);
  const top = Math.max(1, ...values);
  const points = values.map((v, i) => `${((i * 78) / 59 + 1).toFixed(1)},${(19 - (v * 18) / top).toFixed(1)}`);
  const label = `${what}: ${values.length ? `${count(values[0])}, and now ${count(values.at(-1))}` : "not known yet"}`;
  return svg("svg", { class: "spark", viewBox: "0 0 80 20", role: "img", "aria-label": label },
    svg("title", {}, label), svg("polyline", { points: points.length > 1 ? points.join(" ") : "", fill: "none" }));
}
