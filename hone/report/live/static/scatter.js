// Length against reward, coloured and shaped by verdict, and a histogram of lengths: drawn on a canvas.

import { get } from "./api.js";
import { colour, faint } from "./chart.js";
import { fill, h } from "./dom.js";
import { number, plural, whole, words } from "./format.js";

const LOOKS = { correct: ["valid", "circle"], wrong: ["before", "cross"], malformed: ["extra", "square"], truncated: ["after", "dash"] };
const HEIGHT = 170;
const BINS = 40;
const PAD = { left: 44, right: 10, top: 10, bottom: 24 };

export class Scatter {
  constructor(place, picked) {
    this.canvas = h("canvas", { role: "img" });
    this.canvas.style.height = `${HEIGHT}px`;
    this.tip = h("p.tip", { "aria-hidden": "true" });
    this.legend = h("ul.legend");
    this.bars = h("canvas", { role: "img" });
    this.bars.style.height = `${HEIGHT}px`;
    this.place = place;
    fill(place, h("figure", null, h("figcaption", null, "Reward by length"), this.canvas, this.tip, this.legend),
      h("figure.histogram", null, h("figcaption", null, "How long the answers are"), this.bars));
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => (this.tip.textContent = ""));
    this.canvas.addEventListener("click", (event) => { const near = this.near(event); if (near) picked(near); });
    new ResizeObserver(() => this.draw()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  async load(path, signal) {
    this.points = await get(path, signal);
    this.place.hidden = this.points.drawn < 2;
    this.draw();
  }

  draw() {
    if (!this.points || this.place.hidden || !this.canvas.clientWidth) return;
    const { tokens, total, verdict } = this.points.columns;
    const known = total.filter((value) => value !== null);
    this.range = { x: [0, Math.max(1, ...tokens) * 1.03], y: spread(known) };
    this.dots();
    this.histogram(tokens);
    const counts = new Map();
    for (const code of verdict) counts.set(code, (counts.get(code) ?? 0) + 1);
    fill(this.legend, [...counts].map(([code, n]) => {
      const name = this.points.verdicts[code];
      return h("li", { class: `c-${LOOKS[name]?.[0] ?? "muted"}` }, h("i", { class: LOOKS[name]?.[1] ?? "circle" }), words(name), " ", h("b", null, whole(n)));
    }));
    this.canvas.setAttribute("aria-label", `Reward against length of ${plural(this.points.drawn, "answer")}, coloured by verdict`);
    this.bars.setAttribute("aria-label", `Histogram of lengths, from ${whole(Math.min(...tokens))} to ${whole(Math.max(...tokens))} tokens`);
  }

  dots() {
    const { ctx, x, y } = axes(this.canvas, this.range);
    const { tokens, total, verdict, place } = this.points.columns;
    this.at = [];
    const jitter = (this.range.y[1] - this.range.y[0]) * 0.03;
    for (let i = 0; i < tokens.length; i++) {
      if (total[i] === null) continue;
      const [name, shape] = LOOKS[this.points.verdicts[verdict[i]]] ?? ["muted", "circle"];
      const px = x(tokens[i]);
      const py = y(total[i] + jitter * (((place[i] * 37 + i * 11) % 19) / 9 - 1)); // rewards are often equal
      this.at.push([px, py, i]);
      glyph(ctx, shape, px, py, faint(name, tokens.length > 1500 ? 0.4 : 0.65));
    }
  }

  histogram(tokens) {
    const counts = new Array(BINS).fill(0);
    const most = this.range.x[1];
    for (const value of tokens) counts[Math.min(BINS - 1, Math.floor((BINS * value) / most))]++;
    const { ctx, x, y } = axes(this.bars, { x: [0, most], y: [0, Math.max(...counts) * 1.05 || 1] });
    ctx.fillStyle = faint("train", 0.55);
    counts.forEach((count, i) => {
      const left = x((i * most) / BINS);
      ctx.fillRect(left + 0.5, y(count), x(((i + 1) * most) / BINS) - left - 1, y(0) - y(count));
    });
  }

  near(event) {
    const box = this.canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    let distance = 144;
    for (const [x, y, i] of this.at ?? []) {
      const d = (x - px) ** 2 + (y - py) ** 2;
      if (d < distance) { distance = d; best = i; }
    }
    if (best === null) return null;
    return Object.fromEntries(Object.entries(this.points.columns).map(([name, values]) => [name, values[best]]));
  }

  hover(event) {
    const near = this.near(event);
    this.canvas.style.cursor = near ? "pointer" : "";
    this.tip.textContent = near ? `step ${near.step}: ${words(this.points.verdicts[near.verdict])}, reward ${number(near.total)}, ${plural(near.tokens, "token")}` : "";
  }
}

function spread(values) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const room = (high - low || 1) * 0.12;
  return values.length ? [low - room, high + room] : [0, 1];
}

function axes(canvas, range) {
  const width = canvas.clientWidth;
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = HEIGHT * ratio;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  const x = (value) => PAD.left + ((value - range.x[0]) / (range.x[1] - range.x[0])) * (width - PAD.left - PAD.right);
  const y = (value) => HEIGHT - PAD.bottom - ((value - range.y[0]) / (range.y[1] - range.y[0])) * (HEIGHT - PAD.top - PAD.bottom);
  ctx.font = "12px system-ui, sans-serif";
  ctx.fillStyle = colour("muted");
  ctx.strokeStyle = colour("grid");
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  for (const tick of ticks(range.y, 4)) {
    ctx.fillText(number(tick), PAD.left - 8, y(tick));
    ctx.beginPath();
    ctx.moveTo(PAD.left, Math.round(y(tick)) + 0.5);
    ctx.lineTo(width - PAD.right, Math.round(y(tick)) + 0.5);
    ctx.stroke();
  }
  ctx.textAlign = "center";
  for (const tick of ticks(range.x, Math.max(2, Math.floor(width / 110)))) ctx.fillText(number(tick), x(tick), HEIGHT - 9);
  return { ctx, x, y };
}

function ticks([low, high], count) {
  const raw = (high - low) / count;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * size).find((value) => value >= raw);
  const list = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) list.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return list;
}

function glyph(ctx, shape, x, y, style) {
  ctx.fillStyle = ctx.strokeStyle = style;
  ctx.lineWidth = 1.5;
  ctx.beginPath();
  if (shape === "circle") ctx.arc(x, y, 2.8, 0, 7);
  else if (shape === "square") ctx.rect(x - 2.4, y - 2.4, 4.8, 4.8);
  else if (shape === "dash") ctx.rect(x - 3.4, y - 1, 6.8, 2);
  else { ctx.moveTo(x - 2.6, y - 2.6); ctx.lineTo(x + 2.6, y + 2.6); ctx.moveTo(x + 2.6, y - 2.6); ctx.lineTo(x - 2.6, y + 2.6); return ctx.stroke(); }
  ctx.fill();
}
