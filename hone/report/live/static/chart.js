// Line charts on uPlot: the page's colours, event marks, bands, one cursor for all charts of a page.
/* global uPlot */

import { h } from "./dom.js";
import { number } from "./format.js";

const HEIGHT = 200;
/** Distances of ticks between whole numbers: there is no step 2.5. */
const WHOLE = Array.from({ length: 12 }, (_, i) => [1, 2, 5].map((n) => n * 10 ** i)).flat();

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A colour with an opacity from 0 to 1. */
export function faint(name, opacity) {
  return colour(name) + Math.round(255 * opacity).toString(16).padStart(2, "0");
}

/** Mean of the `width` values around each; gaps stay gaps. */
export function smooth(values, width) {
  if (width <= 1) return values;
  const half = Math.floor(width / 2);
  return values.map((value, i) => {
    if (value === null) return null;
    let sum = 0;
    let count = 0;
    for (let k = Math.max(0, i - half); k <= Math.min(values.length - 1, i + half); k++) {
      if (values[k] !== null) { sum += values[k]; count++; }
    }
    return sum / count;
  });
}

/**
 * A chart in a card. `spec`: {key, title, about, unit, x: [..], lines: [{label, colour, values, raw, low, high, points, dash}],
 * log (the horizontal axis), marks: [{x, text, strong}], shades: [{from, to}], xLabel (of the horizontal axis), share, pick(index)}.
 */
export class Chart {
  constructor(spec, sync) {
    this.sync = sync;
    this.title = h("h2", null, spec.title);
    this.value = h("span.value");
    this.box = h("div.plot", { role: "img" });
    this.legend = h("ul.legend");
    this.element = h("section.chart", { "data-key": spec.key },
      h("header", null, this.title, this.value), this.box, this.legend,
      (this.about = h("p.about")));
    this.update(spec);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.box);
  }

  update(spec) {
    this.spec = spec;
    this.box.setAttribute("aria-label", describe(spec));
    this.about.textContent = spec.about ?? "";
    this.caption();
    const shape = JSON.stringify([spec.lines.map((line) => [line.label, Boolean(line.low), Boolean(line.raw)]), spec.xLabel]);
    if (this.plot && shape === this.shape) return this.plot.setData(data(spec));
    this.plot?.destroy();
    this.shape = shape;
    this.plot = this.box.clientWidth ? this.build() : null;
  }

  build() {
    const { spec } = this;
    return new uPlot(options(this, this.box.clientWidth), data(spec), this.box);
  }

  resize() {
    const width = this.box.clientWidth;
    if (!width) return;
    if (!this.plot) this.plot = this.build();
    else if (Math.abs(this.plot.width - width) > 1) this.plot.setSize({ width, height: HEIGHT });
  }

  /** The values at a position, else the last ones. */
  caption(index) {
    const { spec } = this;
    const at = index ?? spec.x.length - 1;
    const shown = (line) => {
      const values = line.exact ?? line.values; // never the smoothed ones
      for (let i = at; i >= 0; i--) if (values[i] !== null || index !== undefined) return values[i] ?? null;
      return null;
    };
    const lines = spec.lines.filter((line) => !line.quiet);
    const where = index === undefined ? "" : spec.steps ? `step ${number(spec.steps[index], 9)}` : `${spec.xLabel} ${number(spec.x[index], 9)}`;
    this.value.textContent = [where, lines.length === 1 ? format(spec, shown(lines[0])) : ""].filter(Boolean).join(" · ");
    this.legend.replaceChildren(...(lines.length === 1 ? [] : lines.map((line) =>
      h("li", { class: `c-${line.colour}${line.dash ? " dashed" : ""}` }, h("i"), line.label, " ", h("b", null, format(spec, shown(line)))))));
  }

  destroy() {
    this.observer.disconnect();
    this.plot?.destroy();
  }
}

function format(spec, value) {
  return spec.share && value !== null ? `${number(100 * value, value < 0.01 ? 2 : 3)}%` : number(value) + (spec.unit ? ` ${spec.unit}` : "");
}

function describe(spec) {
  const parts = spec.lines.map((line) => {
    const known = (line.exact ?? line.values).filter((value) => value !== null);
    if (!known.length) return `${line.label}: no values`;
    return `${line.label}: from ${number(known[0])} to ${number(known.at(-1))}, lowest ${number(Math.min(...known.slice(-2000)))}, highest ${number(Math.max(...known.slice(-2000)))}`;
  });
  return `${spec.title}. ${parts.join("; ")}.`;
}

function data(spec) {
  const columns = [spec.x];
  for (const line of spec.lines) {
    if (line.raw) columns.push(line.raw);
    if (line.low) columns.push(line.low, line.high);
    columns.push(line.values);
  }
  return columns;
}

function series(spec) {
  const all = [{}];
  const bands = [];
  for (const line of spec.lines) {
    if (line.raw) all.push({ stroke: faint(line.colour, line.low ? 0.4 : 0.28), width: 1, points: { show: false } });
    if (line.low) {
      const edge = { stroke: faint(line.colour, line.points ? 0.6 : 0.25), width: line.points ? 1 : 0.5, points: { show: false }, spanGaps: true };
      all.push({ ...edge }, { ...edge });
      bands.push({ series: [all.length - 1, all.length - 2], fill: faint(line.colour, 0.14) });
    }
    all.push({
      stroke: colour(line.colour), width: 2, dash: line.dash, spanGaps: Boolean(line.points),
      points: { show: Boolean(line.points), size: 6, fill: colour(line.colour) },
    });
  }
  return { series: all, bands };
}

function options(chart, width) {
  const { spec } = chart;
  const axis = { stroke: colour("muted"), font: "12px system-ui, sans-serif", ticks: { show: false } };
  return {
    width,
    height: HEIGHT,
    ...series(spec),
    legend: { show: false },
    padding: [8, 8, 0, 0],
    scales: { x: spec.log ? { time: false, distr: 3, log: 2 } : { time: false }, y: { range: (u, low, high) => span(chart.spec, low, high) } },
    axes: [
      { ...axis, grid: { show: false }, size: 24, ...(spec.x.every(Number.isInteger) ? { incrs: WHOLE } : {}),
        ...(spec.xLabel ? { label: spec.xLabel, labelSize: 15, labelGap: 0, labelFont: "11px system-ui, sans-serif" } : {}), values: (u, ticks) => ticks.map((tick) => number(tick, 4)) },
      { ...axis, size: 52, grid: { stroke: colour("grid"), width: 1 },
        values: (u, ticks) => ticks.map((tick) => (spec.share ? `${number(100 * tick)}%` : number(tick))) },
    ],
    cursor: {
      sync: { key: chart.sync, setSeries: false, scales: ["x", null] },
      points: { size: 7 },
      drag: { x: true, y: false },
      y: false,
    },
    hooks: {
      setCursor: [(u) => chart.caption(u.cursor.idx ?? undefined)],
      drawClear: [(u) => shade(u, chart.spec)],
      draw: [(u) => mark(u, chart.spec)],
      ready: [(u) => clicks(u, chart)],
    },
  };
}

function span(spec, low, high) {
  if (low === null || high === null) return [0, 1];
  if (spec.share) return [0, Math.max(0.02, Math.min(1, high * 1.08))];
  const differ = high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high)); // else it is rounding
  const room = (differ ? high - low : Math.abs(high) || 1) * 0.08;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

/** A click that is not a drag opens what is at that step. */
function clicks(u, chart) {
  let start = null;
  u.over.addEventListener("mousedown", (event) => (start = event.clientX));
  u.over.addEventListener("mouseup", (event) => {
    if (start !== null && Math.abs(event.clientX - start) < 4 && u.cursor.idx !== null) chart.spec.pick?.(u.cursor.idx);
    start = null;
  });
  if (chart.spec.pick) u.over.classList.add("pick");
}

function shade(u, spec) {
  u.ctx.save();
  u.ctx.fillStyle = faint("muted", 0.07);
  for (const { from, to } of spec.shades ?? []) {
    const left = u.valToPos(Math.max(from, u.scales.x.min), "x", true);
    const right = u.valToPos(Math.min(to, u.scales.x.max), "x", true);
    if (right > left) u.ctx.fillRect(left, u.bbox.top, right - left, u.bbox.height);
  }
  u.ctx.restore();
}

function mark(u, spec) {
  const { ctx } = u;
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  for (const { x, strong } of spec.marks ?? []) {
    if (x < u.scales.x.min || x > u.scales.x.max) continue;
    const at = Math.round(u.valToPos(x, "x", true)) + 0.5;
    ctx.strokeStyle = strong ? colour("before") : faint("muted", 0.6);
    ctx.setLineDash(strong ? [] : [3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(at, u.bbox.top);
    ctx.lineTo(at, u.bbox.top + u.bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

/** A spark line without axes, as SVG. */
export function spark(values, label) {
  const known = values.filter((value) => value !== null);
  const low = Math.min(...known);
  const high = Math.max(...known);
  const scale = high > low ? 20 / (high - low) : 0;
  const points = values.map((value, i) => value === null ? null : `${((i * 100) / Math.max(1, values.length - 1)).toFixed(1)},${(22 - (value - low) * scale).toFixed(1)}`);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "spark");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", known.length ? `${label} from ${number(known[0])} to ${number(known.at(-1))}` : `${label}: no values yet`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.filter(Boolean).join(" "));
  svg.append(line);
  return svg;
}

export const syncKey = "hone";
