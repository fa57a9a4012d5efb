// How rewards, lengths and entropies spread over time, the mix of groups, and which problems are solved when.

import { base, get } from "./api.js";
import { Chart, syncKey } from "./chart.js";
import { fill, h, link, none } from "./dom.js";
import { address, percent, plural } from "./format.js";

const COLUMNS = [["total", "Reward", "train", ""], ["tokens", "Length", "before", "tokens"], ["entropy", "Entropy", "valid", "nats"]];
const MIX = [["all right", "valid"], ["mixed", "train"], ["all wrong", "before"]];

export async function page(context) {
  const path = `${base(context.run, context.stage)}/distributions`;
  const grid = h("div.charts");
  const map = h("div.heat");
  const about = h("p.quiet");
  fill(context.main, h("section.page", null, h("div.title", null, h("h1", null, "Distributions"), about), grid, map));
  let before = "";
  const charts = new Map();
  const draw = async () => {
    const data = await get(path, context.signal);
    const text = JSON.stringify(data);
    if (text === before) return false;
    before = text;
    if (!data.steps.length) return fill(map, none(context));
    about.textContent = data.width > 1 ? `Each point is ${data.width} steps.` : "Each point is a step.";
    const open = (at) => (location.hash = address(context.run, context.stage, "rollouts", [], { from: data.steps[at], to: data.steps[at] + data.width - 1 }));
    const specs = [
      ...COLUMNS.flatMap(([key, title, colour, unit]) => quantiles(data, key, title, colour, unit)),
      { key: "mix", title: "Mix of groups", xLabel: "step", about: "Only mixed groups teach anything where the reward is the verdict alone.", share: true, x: data.steps,
        lines: MIX.map(([key, colour]) => ({ label: key, colour, values: data.groups[key] })) },
    ];
    for (const spec of specs) {
      if (charts.has(spec.key)) charts.get(spec.key).update({ ...spec, pick: open });
      else charts.set(spec.key, new Chart({ ...spec, pick: open }, syncKey));
    }
    fill(grid, [...charts.values()].map((chart) => chart.element));
    fill(map, heat(context, data));
  };
  await draw();
  context.signal.addEventListener("abort", () => charts.forEach((chart) => chart.destroy()));
  context.every(draw);
}

function quantiles(data, key, title, colour, unit) {
  const [low, , q1, median, q3, , high] = data.columns[key];
  if (!median.some((value) => value !== null)) return [];
  return [{ key, title: `${title}, median`, unit, x: data.steps, xLabel: "step", about: "Line: median. Inner band: the middle half. Outer band: from the smallest to the largest.",
    lines: [{ label: "everything", quiet: true, colour: "muted", values: median, low, high }, { label: "median", colour, values: median, low: q1, high: q3 }] }];
}

function heat(context, data) {
  const { solved } = data;
  if (solved.names.length < 1 || !data.steps.length) return null;
  const rows = solved.names.map((name, i) => h("tr", null,
    h("th", { scope: "row" }, solved.problems.length ? link(name, address(context.run, context.stage, "rollouts", [], { problem: solved.problems[i] })) : name ? `level ${name}` : "all"),
    solved.shares[i].map((share, at) => h("td", { class: share === null ? "none" : `h${Math.round(share * 8)}`, title: share === null ? null : `${name}, step ${data.steps[at]}: ${percent(share)} correct` }))));
  const of = solved.of > solved.names.length ? `, ${solved.names.length} of ${plural(solved.of, solved.by)}, spread evenly from hard to easy` : "";
  return [h("h2", null, solved.by === "problem" ? "Problems over time" : "Levels over time"),
    h("p.quiet", null, `Share of correct answers, hardest first${of}. Pale: none, strong: all, striped: not drawn.`),
    h("div.scroll", { tabindex: 0, role: "region", "aria-label": "Share of correct answers" }, h("table.heatmap", null, h("tbody", null, rows)))];
}
