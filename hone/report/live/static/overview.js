// The charts of a stage: what it learns, how it behaves, how long it takes; a click on a step opens its answers.

import { Rows } from "./api.js";
import { Chart, smooth, syncKey } from "./chart.js";
import { choice, fill, h, link } from "./dom.js";
import { address, duration, evaluation, measure, number, percent, whole, words } from "./format.js";
import { SPECS, isIdle, others } from "./curves.js";

const WIDTHS = [["1", "none"], ["5", "5 steps"], ["15", "15 steps"], ["51", "51 steps"]];
const AXES = [["step", "step"], ["tokens", "trained tokens"], ["minutes", "minutes"]];
/** Steps that are named of those with the same warning, the newest. */
const MOST_STEPS = 6;

export async function page(context) {
  const files = Object.fromEntries(["metrics", "timings", "evals", "events"].map((name) => [name, new Rows(context.run, context.stage, name)]));
  const view = {
    axis: AXES.some(([key]) => key === context.params.get("x")) ? context.params.get("x") : "step",
    width: Number(context.params.get("smooth") ?? 5),
  };
  const tiles = h("dl.tiles");
  const notes = h("div.notes");
  const grid = h("div.charts");
  const more = h("div.charts");
  const idle = h("p.quiet");
  const marks = h("p.quiet.marks");
  const rest = h("details.more", null, h("summary", null, "Every other column"), more);
  const controls = h("div.controls", null,
    choice("Horizontal", AXES, view.axis, (value) => { view.axis = value; draw(); }),
    choice("Smoothing", WIDTHS, String(view.width), (value) => { view.width = Number(value); draw(); }));
  fill(context.main, h("section.page", null, h("div.title", null, h("h1", null, "Overview"), controls), tiles, notes, marks, grid, idle, rest));

  const charts = new Map();
  const draw = () => {
    const known = Object.fromEntries(Object.entries(files).map(([name, file]) => [name, file.rows]));
    known.metrics = files.metrics.bySteps;
    const x = axisOf(view.axis, known);
    const marked = marksOf(context.state, known.events, known.metrics, x);
    const build = (spec) => spec(known, x);
    const all = SPECS.map(build).filter(Boolean);
    const specs = all.filter((spec) => !isIdle(spec));
    const zeros = all.filter(isIdle);
    const extra = others(known, x, all);
    fill(idle, zeros.length ? `0 in every step so far: ${zeros.map((spec) => spec.title.toLowerCase().replace(/^kl/, "KL")).join(", ")}.` : null);
    fill(marks, legend(context, marked, view.width));
    place(context, charts, grid, specs, marked, view, x);
    place(context, charts, more, rest.open ? extra : [], marked, view, x);
    rest.hidden = extra.length === 0;
    fill(tiles, summary(context, known));
    fill(notes, warnings(context, known.events));
    if (!known.metrics.length) fill(grid, h("p.empty", null, "This stage has no finished step yet; the charts begin with the first one."));
  };
  rest.addEventListener("toggle", draw);
  await Promise.all(Object.values(files).map((file) => file.refresh(context.signal)));
  draw();
  context.keys({ x: ["next horizontal axis", () => {
    const at = AXES.findIndex(([key]) => key === view.axis);
    const select = controls.querySelector("select");
    select.value = AXES[(at + 1) % AXES.length][0];
    select.dispatchEvent(new Event("change"));
  }] });
  context.signal.addEventListener("abort", () => charts.forEach((chart) => chart.destroy()));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => { charts.forEach((chart) => { chart.shape = ""; }); draw(); }, { signal: context.signal });
  let looks = 0;
  context.every(async () => {
    const { metrics, ...slow } = files; // these change with a step, seldom without one
    const step = await metrics.refresh(context.signal);
    const changed = step || ++looks % 3 === 0 ? await Promise.all(Object.values(slow).map((file) => file.refresh(context.signal))) : [];
    if (!step && !changed.some(Boolean)) return false;
    draw();
  });
}

function place(context, charts, grid, specs, marked, view, x) {
  const sampled = samples(context);
  const elements = specs.map((spec) => {
    const own = spec.x === x;
    const lines = spec.lines.map((line) => (line.points || view.width <= 1) ? line :
      { ...line, raw: line.values, exact: line.values, values: smooth(line.values, view.width) });
    const shown = { ...spec, lines, xLabel: spec.xLabel ?? (own ? AXES.find(([key]) => key === view.axis)[1] : "step"), ...(spec.alone ? {} : own ? marked : { marks: marked.marks }), pick: sampled ? (at) => {
      const step = spec.steps[at];
      location.hash = address(context.run, context.stage, "rollouts", [], { from: step, to: step });
    } : null };
    const chart = charts.get(spec.key);
    if (chart) chart.update(shown);
    else charts.set(spec.key, new Chart(shown, spec.alone ? spec.key : syncKey));
    return charts.get(spec.key).element;
  });
  if (elements.length !== grid.children.length || elements.some((element, i) => grid.children[i] !== element)) grid.replaceChildren(...elements);
}

/** The horizontal position of each row of metrics. */
function axisOf(axis, { metrics, timings }) {
  if (axis === "step") return metrics.map((row) => row.step);
  const seconds = new Map(timings.map((row) => [row.step, row.seconds ?? 0]));
  let sum = 0;
  return metrics.map((row) => (sum += axis === "tokens" ? row.trained_tokens ?? 0 : (seconds.get(row.step) ?? 0) / 60));
}

/** Event marks, and a shade over every other phase between hard resets or lines of the schedule. */
function marksOf(state, events, metrics, x) {
  const position = new Map(metrics.map((row, i) => [row.step, x[i]]));
  const at = (step) => position.get(step) ?? (step > (metrics.at(-1)?.step ?? 0) ? x.at(-1) : null);
  const marks = events.filter((event) => Number.isInteger(event.step) && !state.routine.includes(event.kind))
    .map((event) => ({ x: at(event.step), text: event.message, strong: state.warnings.includes(event.kind) })).filter((one) => one.x !== null && one.x !== undefined);
  const edges = [...new Set(events.filter((event) => event.kind === "reset" || event.kind === "phase").map((event) => at(event.step)))]
    .filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  const shades = edges.flatMap((from, i) => (i % 2 === 0 ? [{ from, to: edges[i + 1] ?? Infinity }] : []));
  return { marks, shades };
}

/** Whether the stage has sampled answers so far. */
const samples = (context) => context.state.stages.find((one) => one.name === context.stage)?.rollouts ?? false;

/** What the lines and shades in the charts mean, as far as there are any. */
function legend(context, { marks, shades }, width) {
  const items = [
    marks.some((one) => one.strong) ? [h("i.solid"), "an event that needs a look"] : null,
    marks.some((one) => !one.strong) ? [h("i.dotted"), "another event"] : null,
    shades.length ? [h("i.shade"), "every other phase between hard resets or schedule lines"] : null].filter(Boolean);
  return [samples(context) ? h("span", null, "Click a step to open its answers.") : null,
    width > 1 ? h("span", null, `Thin lines: the values themselves; thick: means of ${width} steps.`) : null, items.map((item) => h("span", null, item))];
}

function summary(context, { metrics, evals }) {
  const stage = context.state.stages.find((one) => one.name === context.stage);
  const last = metrics.at(-1);
  if (!last) return [];
  const validation = evals.findLast((row) => row.accuracy || row.reward);
  const held = metrics.findLast((row) => typeof row.validation_loss === "number");
  const [value, range] = validation ? measure(validation).split(/ (?=\()/) : [];
  const tile = (title, value, below) => value === null ? null : h("div", null, h("dt", null, title), h("dd", null, h("b", null, value), below ? h("span", null, below) : null));
  const steps = stage?.planned ? `of ${whole(stage.planned)}` : "";
  return [
    tile("Steps done", whole(last.step + 1), steps),
    "reward/mean" in last ? tile("Reward", number(last["reward/mean"]), `± ${number(last["reward/std"])}`) : tile("Loss", number(last.loss), held ? `validation ${number(held.validation_loss)}` : ""),
    validation ? tile(evaluation(validation.label).replace(/^./, (first) => first.toUpperCase()) + (validation.accuracy ? "" : ", reward"), value, `${range} at step ${validation.step}`) : null,
    "length/mean" in last ? tile("Length", number(last["length/mean"]), "tokens") : null,
    "zero_variance" in last ? tile("Groups without a difference", percent(last.zero_variance), "") : null,
    stage?.seconds_left && context.state.state === "running" ? tile("Time left", duration(stage.seconds_left), "") : null,
  ].filter(Boolean);
}

/** Advisories of the watch and of the guards, in words, the newest first. */
function warnings(context, events) {
  const list = events.filter((event) => context.state.warnings.includes(event.kind)).reverse();
  if (!list.length) return null;
  const same = new Map(); // what is said of several steps is said once
  for (const event of list) {
    const text = (event.message ?? "").replace(/^step \d+: /, "") || words(event.kind);
    same.set(text, [...(same.get(text) ?? []), event.step].filter(Number.isInteger));
  }
  const to = (step) => link(String(step), address(context.run, context.stage, "rollouts", [], { from: step, to: step }));
  const where = (steps) => [steps.length > 1 ? "Steps " : "Step ", steps.slice(0, MOST_STEPS).reverse().map((step, i) => [i ? ", " : "", to(step)]), steps.length > MOST_STEPS ? ` and ${steps.length - MOST_STEPS} more` : "", ": "];
  const item = ([text, steps]) => h("li", null, steps.length ? where(steps) : null, text);
  return [h("h2", null, `Needs a look`), h("ul", null, [...same].slice(0, 4).map(item)),
    same.size > 4 ? link(`${same.size - 4} more in the log`, address(context.run, context.stage, "log")) : null];
}
