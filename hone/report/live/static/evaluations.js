// Evaluations with their intervals, and what changed between two of them, problem by problem.

import { base, get } from "./api.js";
import { verdict } from "./answer.js";
import { Chart } from "./chart.js";
import { choice, fill, h } from "./dom.js";
import { evaluation, interval, mean, number, percent, plural, whole, words } from "./format.js";

const KINDS = [["solved", "Newly solved"], ["lost", "Lost"], ["both", "Solved both times"], ["neither", "Solved neither time"]];

export async function page(context) {
  const path = base(context.run, context.stage);
  const { rows } = await get(`${path}/evaluations`, context.signal);
  if (!rows.length) {
    return fill(context.main, h("section.page", null, h("h1", null, "Evaluations"),
      h("p.empty", null, "No evaluation yet. ", h("code", null, "eval.every"), " in the recipe asks for them during training.")));
  }
  const table = h("div.scroll", { tabindex: 0, role: "region", "aria-label": "Evaluations" }, overview(rows));
  const flips = h("div.flips");
  const curve = passes(rows);
  const named = rows.map((row) => [row.key, `${evaluation(row.label)}, step ${row.step}`]);
  const [first, second] = pair(rows);
  const sides = { a: first.key, b: second.key };
  const load = async () => {
    if (sides.a === sides.b) return fill(flips, h("p.quiet", null, "Choose two different evaluations."));
    try {
      const query = new URLSearchParams(sides);
      fill(flips, change(context, path, rows, await get(`${path}/flips?${query}`, context.signal), sides));
    } catch (error) {
      if (error.name !== "AbortError") fill(flips, h("p.quiet", null, error.message));
    }
  };
  fill(context.main, h("section.page", null, h("div.title", null, h("h1", null, "Evaluations")), table,
    curve ? h("div.charts", null, curve.element) : null,
    rows.length > 1 ? [h("h2", null, "What changed"), h("div.controls", null,
      choice("From", named, sides.a, (value) => { sides.a = value; load(); }), choice("to", named, sides.b, (value) => { sides.b = value; load(); })), flips] : null));
  if (rows.length > 1) await load();
}

/** The first and last evaluation of the label that has most of them, or before and after. */
function pair(rows) {
  const before = rows.find((row) => row.label === "before");
  const after = rows.find((row) => row.label === "after");
  if (before && after) return [before, after];
  const validation = rows.filter((row) => row.label === "validation");
  return validation.length > 1 ? [validation[0], validation.at(-1)] : [rows[0], rows.at(-1)];
}

function overview(rows) {
  const levels = [...new Set(rows.flatMap((row) => Object.keys(row.by_level ?? {})))].slice(0, 8);
  const ks = [...new Set(rows.flatMap((row) => Object.keys(row.pass_at_k ?? {})))].map(Number).sort((a, b) => a - b).filter((k) => k > 1);
  const rewarded = rows.some((row) => row.reward);
  const head = ["Evaluation", "Step", "Accuracy", ...(rewarded ? ["Mean reward"] : []), ...ks.map((k) => `pass@${k}`), "Cut off", "Tokens", ...(levels.length > 1 ? levels.map((level) => `Level ${level}`) : [])];
  return h("table", null, h("thead", null, h("tr", null, head.map((title, i) => h("th", { scope: "col", class: i ? "num" : null }, title)))),
    h("tbody", null, rows.map((row) => h("tr", null,
      h("th", { scope: "row" }, evaluation(row.label)), h("td.num", null, whole(row.step)), h("td.num", null, interval(row.accuracy), bar(row.accuracy)),
      rewarded ? h("td.num", null, mean(row.reward)) : null,
      ks.map((k) => h("td.num", null, interval(row.pass_at_k?.[k]))),
      h("td.num", null, percent(row.truncation_rate)), h("td.num", null, number(row.response_tokens)),
      levels.length > 1 ? levels.map((level) => h("td.num", null, interval(row.by_level?.[level]))) : null))));
}

/** pass@k against k with its bands: before, after, and else the first and last evaluations that drew several samples. */
function passes(rows) {
  const drawn = rows.filter((row) => Object.keys(row.pass_at_k ?? {}).length > 1);
  const ends = drawn.filter((row) => row.label === "before" || row.label === "after");
  const shown = ends.length ? ends.slice(-4) : [...new Set([drawn[0], drawn.at(-1)])].filter(Boolean);
  if (!shown.length) return null;
  const ks = [...new Set(shown.flatMap((row) => Object.keys(row.pass_at_k)))].map(Number).sort((a, b) => a - b);
  const colours = ["before", "after", "valid", "extra"];
  const pick = (row, name) => ks.map((k) => row.pass_at_k[k]?.[name] ?? null);
  return new Chart({ key: "pass", title: "pass@k against k", share: true, log: true, x: ks, xLabel: "k",
    about: "The chance that at least one of k answers is right; bands: 95% intervals.",
    lines: shown.map((row, i) => ({ label: `${evaluation(row.label)}, step ${row.step}`, colour: colours[i], points: true,
      values: pick(row, "value"), low: pick(row, "low"), high: pick(row, "high") })) }, "passes");
}

/** The interval as a line, the value as a dot. */
function bar(value) {
  if (!value) return null;
  const box = h("span.range", { "aria-hidden": "true" }, h("i"), h("b"));
  for (const name of ["value", "low", "high"]) box.style.setProperty(`--${name}`, `${100 * value[name]}%`);
  return box;
}

function change(context, path, rows, result, sides) {
  const levels = new Set(rows.flatMap((row) => Object.keys(row.by_level ?? {}))).size > 1;
  const { difference } = result;
  const points = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${Math.abs(100 * value).toFixed(1)}`;
  const sure = difference.low > 0 || difference.high < 0;
  return [
    h("p.lead", null, h("b", null, `${points(difference.value)} points`), ` (95% interval ${points(difference.low)} to ${points(difference.high)}) on ${plural(difference.n, "problem")}, paired. `,
      sure ? "" : "The interval contains 0: this may be chance. ", h("span.quiet", null, `p = ${number(result.p_value)}, ${result.method}.`)),
    result.never_before ? h("p", null, `${plural(result.never_before, "problem")} had no correct answer before and ${result.never_before === 1 ? "has" : "have"} one now.`) : null,
    h("div.kinds", null, KINDS.map(([kind, title]) => h("details", { open: kind === "lost" },
      h("summary", null, `${title} `, h("b", null, whole(result.counts[kind]))),
      h("ul.problems", null, result.problems[kind].map((one) => h("li", null, h("button", { type: "button", onclick: (event) => answers(context, path, sides, one, event.target) }, one.problem),
        h("span.quiet", null, `${levels && one.level ? `level ${one.level}, ` : ""}${percent(one.before)} → ${percent(one.after)}`))),
      result.counts[kind] > result.problems[kind].length ? h("li.quiet", null, `and ${whole(result.counts[kind] - result.problems[kind].length)} more`) : null)))),
  ];
}

/** The answers to one problem in both evaluations, below its name. */
async function answers(context, path, sides, one, button) {
  const place = button.parentElement;
  const shown = place.querySelector(".pair");
  if (shown) return shown.remove();
  const result = await get(`${path}/answers?${new URLSearchParams({ ...sides, problem: one.problem })}`, context.signal);
  const column = (key) => h("div", null, h("h4", null, evaluation(key.split("@")[0]), `, step ${key.split("@")[1]}`),
    (result[key] ?? []).slice(0, 8).map((row) => [h("p", null, verdict(row.verdict)), h("pre.answer", null, row.text ?? "")]));
  const prompt = result[sides.a]?.[0]?.prompt;
  place.append(h("div.pair", null, prompt ? h("pre.prompt", null, prompt) : null, h("div.sides", null, column(sides.a), column(sides.b))));
}
