// All runs of a folder: state, progress, latest numbers, spark lines; several chosen ones are compared.

import { badge } from "./badge.js";
import { Rows, get } from "./api.js";
import { Chart, smooth, spark, syncKey } from "./chart.js";
import { fill, h, link } from "./dom.js";
import { evaluation, interval, mean, number, plural, whole } from "./format.js";

const COLOURS = ["train", "before", "valid", "extra", "after", "muted"];
const NUMBERS = new Set(["Step", "Reward", "Held out"]);
const MOST = COLOURS.length;
const MANY = 9; // runs with which a search is offered
const COMPARED = [["reward/mean", "Reward", false], ["accuracy", "Accuracy on training problems", true], ["length/mean", "Length, tokens", false], ["entropy", "Entropy, nats", false]];

export async function page(context, shelf) {
  const chosen = new Set();
  const table = h("div.scroll", { tabindex: 0, role: "region", "aria-label": "Runs" });
  const below = h("div.compared");
  let text = "";
  const search = h("label.field", { hidden: true }, h("span", null, "Search in names"), h("input", { type: "search", id: "search", oninput: (event) => { text = event.target.value.trim().toLowerCase(); draw(); } }));
  fill(context.main, h("section.page", null,
    h("div.title", null, h("h1", null, "Runs"), h("p.quiet", null, shelf.folder), h("div.controls", null, search)), table, below));
  const named = () => shelf.runs.filter((run) => run.name.toLowerCase().includes(text));
  const draw = () => {
    search.hidden = shelf.runs.length < MANY;
    fill(table, shelf.runs.length ? [list(named(), chosen, () => compare(context, shelf, chosen, below)),
    h("p.quiet", null, "Trend: the reward of the last stage that has begun (the loss, where there is none). Held out: the accuracy of the latest evaluation, or the mean reward where the task does not grade, with its 95% interval.",
      named().length ? "" : " No name contains this.",
      shelf.runs.length > 1 ? " Tick two or more runs to compare them." : "")] :
    h("p.empty", null, "No run is here yet. A run appears as soon as ", h("code", null, "hone train"), " has begun."));
  };
  draw();
  context.keys({ "/": ["search", () => document.getElementById("search").focus()], j: ["next run", () => step(table, 1)], k: ["run before", () => step(table, -1)] });
  context.every(async () => {
    const next = await get("/api/runs", context.signal);
    const changed = JSON.stringify(next.runs.map((run) => [run.state, run.stages])) !== JSON.stringify(shelf.runs.map((run) => [run.state, run.stages]));
    shelf = next;
    if (!changed) return false;
    if (!table.contains(document.activeElement?.closest("input"))) draw();
  });
}

function step(table, by) {
  const links = [...table.querySelectorAll("tbody a")];
  const at = links.indexOf(document.activeElement);
  links[Math.max(0, Math.min(links.length - 1, at + by))]?.focus();
}

function list(runs, chosen, changed) {
  const head = ["", "Run", "State", "Stage", "Step", "Trend", "Reward", "Held out"];
  return h("table.runs", null,
    h("thead", null, h("tr", null, head.map((text) => h("th", { scope: "col", class: NUMBERS.has(text) ? "num" : null }, text || h("span.unseen", null, "Compare"))))),
    h("tbody", null, runs.map((run) => row(run, chosen, changed))));
}

function row(run, chosen, changed) {
  const stage = [...run.stages].reverse().find((one) => one.started) ?? run.stages[0];
  const tick = h("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, checked: chosen.has(run.name), onchange: () => {
    if (tick.checked) chosen.add(run.name); else chosen.delete(run.name);
    changed();
  } });
  const latest = run.stages.map((one) => one.validation).filter(Boolean).at(-1);
  return h("tr", null,
    h("td.tick", null, tick),
    h("th", { scope: "row" }, link(run.name, `#/${encodeURIComponent(run.name)}`)),
    h("td", null, badge(run)),
    h("td", { "data-label": "Stage" }, stage?.name === "-" ? stage.kind : stage?.name),
    h("td.num", { "data-label": "Step" }, h("span", null, whole(stage?.done ?? 0), stage?.planned ? h("span.quiet", null, ` / ${whole(stage.planned)}`) : null),
      stage?.planned ? h("progress", { max: stage.planned, value: stage.done, "aria-label": `${stage.done} of ${stage.planned} steps` }) : null),
    h("td.trend", null, stage ? spark(stage.spark.values, stage.spark.name) : null),
    h("td.num", { "data-label": "Reward" }, number(stage?.reward ?? null)),
    h("td.num", { "data-label": "Held out" }, latest ? h("span", null, latest.measure === "reward" ? mean(latest) : interval(latest), h("span.quiet.below", null, latest.label === "validation" ? `${latest.measure === "reward" ? " reward," : ""} step ${whole(latest.step)}` : ` ${evaluation(latest.label)}`)) : "–"));
}

/** Runs of a name that differs only in its seed are drawn as a mean with the range between them. */
async function compare(context, shelf, chosen, below) {
  const names = [...chosen].slice(0, MOST);
  if (names.length < 2) return fill(below, names.length ? h("p.quiet", null, "Choose another run to compare them.") : null);
  const loaded = await Promise.all(names.map(async (name) => {
    const run = shelf.runs.find((one) => one.name === name);
    const stage = run.stages.filter((one) => one.rollouts).at(-1) ?? run.stages.at(-1);
    const rows = new Rows(name, stage.name, "metrics");
    await rows.refresh(context.signal);
    return { name, stage: stage.name, rows: rows.bySteps };
  }));
  const families = bundle(loaded);
  const charts = COMPARED.map(([key, title, share]) => chart(families, key, title, share)).filter(Boolean);
  const settings = names.length === 2 ? link("Differences between their settings",
    `#/${encodeURIComponent(names[0])}/${encodeURIComponent(loaded[0].stage)}/settings?with=${encodeURIComponent(`${names[1]}/${loaded[1].stage}`)}`) : null;
  fill(below, h("h2", null, `${plural(names.length, "run")} compared`),
    h("p.quiet", null, "Runs whose names differ only in their seed (name-s1, name-seed2) share a line: their mean, and the range between them. ", settings),
    h("div.charts", null, charts.map((one) => one.element)));
}

function bundle(loaded) {
  const families = new Map();
  for (const one of loaded) {
    const family = one.name.replace(/[-_.]?(?:seed|s)[-_]?\d+$/i, "");
    families.set(family, [...(families.get(family) ?? []), one]);
  }
  return families;
}

function chart(families, key, title, share) {
  const steps = [...new Set([...families.values()].flat().flatMap((one) => one.rows.map((row) => row.step)))].sort((a, b) => a - b);
  const lines = [...families].map(([family, runs], i) => {
    const columns = runs.map((run) => new Map(run.rows.map((row) => [row.step, row[key]])));
    const at = steps.map((step) => columns.map((column) => column.get(step)).filter((value) => typeof value === "number"));
    if (!at.some((values) => values.length)) return null;
    const mean = at.map((values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null));
    const band = runs.length > 1 ? { low: at.map((v) => (v.length ? Math.min(...v) : null)), high: at.map((v) => (v.length ? Math.max(...v) : null)) } : {};
    return { label: runs.length > 1 ? `${family} (${runs.length} seeds)` : runs[0].name, colour: COLOURS[i % MOST], values: smooth(mean, 5), ...band };
  }).filter(Boolean);
  return lines.length ? new Chart({ key, title, x: steps, xLabel: "step", lines, share }, syncKey) : null;
}
