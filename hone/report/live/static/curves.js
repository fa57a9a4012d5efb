// Which columns make which chart. Each function returns a chart's data, or null where the run has nothing of the kind.

import { words } from "./format.js";

const PART_COLOURS = ["train", "before", "valid", "extra", "after", "muted"];
const NOT_PARTS = new Set(["reward/mean", "reward/std"]);
/** Columns that need no chart of their own. */
const LEFT_OUT = new Set(["step", "phase", "skipped", "reset", "groups/replaced"]);

const numeric = (value) => (typeof value === "number" ? value : null);
const column = (metrics, key) => metrics.map((row) => numeric(row[key]));
const has = (metrics, key) => metrics.some((row) => typeof row[key] === "number");

/** Charts whose absence of change is news. The others are named in a sentence while all their values are 0. */
const ALWAYS = new Set(["reward", "validation", "verdicts", "length", "loss"]);

export function isIdle(spec) {
  return !ALWAYS.has(spec.key) && spec.lines.every((line) => line.values.every((value) => value === null || value === 0));
}

function chart(key, title, { metrics }, x, lines, more = {}) {
  const there = lines.filter((line) => has(metrics, line.key)).map((line) => ({ ...line, values: column(metrics, line.key) }));
  return there.length ? { key, title, x, steps: metrics.map((row) => row.step), lines: there, ...more } : null;
}

const single = (key, title, colour, more) => (known, x) => chart(key, title, known, x, [{ key, label: title, colour }], more);

function reward(known, x) {
  const spec = chart("reward", "Reward", known, x, [{ key: "reward/mean", label: "mean", colour: "train" }],
    { about: "Mean of the step’s answers; the band is one standard deviation." });
  if (!spec || !has(known.metrics, "reward/std")) return spec;
  const sd = column(known.metrics, "reward/std");
  const [line] = spec.lines;
  line.low = line.values.map((value, i) => (value === null || sd[i] === null ? null : value - sd[i]));
  line.high = line.values.map((value, i) => (value === null || sd[i] === null ? null : value + sd[i]));
  return spec;
}

function parts(known, x) {
  const last = known.metrics.at(-1) ?? {};
  const names = Object.keys(last).filter((key) => key.startsWith("reward/") && !NOT_PARTS.has(key));
  if (names.length < 2) return null;
  return chart("parts", "Parts of the reward", known, x, names.slice(0, 6).map((key, i) => ({ key, label: words(key.slice(7)), colour: PART_COLOURS[i] })),
    { about: "Mean score of each part, before its weight." });
}

/** The accuracy on the validation problems, or the mean reward where the task does not grade. */
function validation(known) {
  const name = known.evals.some((row) => row.accuracy) ? "accuracy" : "reward";
  const rows = known.evals.filter((row) => row.label === "validation" && row[name]);
  if (!rows.length) return null;
  const pick = (key) => rows.map((row) => numeric(row[name][key]));
  return { key: "validation", title: `Validation ${name}`, x: rows.map((row) => row.step), steps: rows.map((row) => row.step), share: name === "accuracy",
    about: `By step, on ${rows.at(-1)[name].n} held-out problems; the band is the 95% interval.`,
    lines: [{ label: name, colour: "valid", values: pick("value"), low: pick("low"), high: pick("high"), points: true }] };
}

function verdicts(known, x) {
  const colours = { correct: "valid", wrong: "before", malformed: "extra", truncated: "after", ungraded: "train" };
  const lines = Object.entries(colours).map(([name, colour]) => ({ key: `verdict/${name}`, label: name, colour }))
    .filter((line) => known.metrics.some((row) => row[line.key] > 0));
  return chart("verdicts", "Verdicts", known, x, lines, { share: true, about: "What the grader made of the answers of a step." });
}

function lengths(known, x) {
  const spec = chart("length", "Length of answers, tokens", known, x, [
    { key: "length/p95", label: "95th percentile", colour: "before", dash: [6, 4] },
    { key: "length/mean", label: "mean", colour: "train" }]);
  if (spec && has(known.metrics, "length/min")) {
    const mean = spec.lines.at(-1);
    mean.low = column(known.metrics, "length/min");
    mean.high = column(known.metrics, "length/max");
    spec.about = `The band is from the shortest to the longest answer.${spec.lines.length > 1 ? " Of 100 answers, 95 are shorter than the dashed line." : ""}`;
  }
  return spec;
}

function clipped(known, x) {
  const about = "Tokens that the clip range kept from moving further. High: they had become more likely; low: less likely.";
  return has(known.metrics, "clip_fraction/high") ?
    chart("clip_fraction", "Clipped tokens", known, x, [
      { key: "clip_fraction/high", label: "high", colour: "train" }, { key: "clip_fraction/low", label: "low", colour: "before" }], { share: true, about }) :
    chart("clip_fraction", "Clipped tokens", known, x, [{ key: "clip_fraction", label: "clipped", colour: "train" }], { share: true, about: "Tokens that the clip range kept from moving further." });
}

/** Environments: turns, tool calls and messages that could not be read, means over the episodes of a step. */
function episodes(known, x) {
  return chart("episodes", "Turns and tool calls", known, x, [
    { key: "episode/turns", label: "turns", colour: "train" }, { key: "episode/tool_calls", label: "tool calls", colour: "valid" },
    { key: "episode/malformed", label: "unreadable calls", colour: "before" }], { about: "Per episode, mean of the step." });
}

function phases(known, x) {
  const names = [...new Set(known.timings.flatMap((row) => Object.keys(row)))].filter((key) => key !== "step" && key !== "seconds");
  if (!names.length || !known.metrics.length) return null;
  const at = new Map(known.timings.map((row) => [row.step, row]));
  const lines = names.map((key, i) => ({ label: words(key), colour: PART_COLOURS[i % PART_COLOURS.length], values: known.metrics.map((row) => numeric(at.get(row.step)?.[key])) }))
    .filter((line) => line.values.some((value) => value > 0.005)).slice(0, 6);
  return lines.length ? { key: "time", title: "Time of a step, seconds", about: "Where the time of a step goes.", x, steps: known.metrics.map((row) => row.step), lines } : null;
}

/** Of episodes: how long each turn took in the last step that has times of turns. */
function turns(known) {
  const row = known.timings.findLast((one) => Array.isArray(one.turns) && one.turns.length);
  if (!row) return null;
  const lines = [["generation", "before"], ["environment", "train"], ["slowest", "muted"]].map(([name, colour]) =>
    ({ label: name === "slowest" ? "slowest environment" : name, colour, points: true, values: row.turns.map((turn) => numeric(turn?.[name])) }));
  return { key: "turns", title: "Time of a turn, seconds", about: `By number of the turn, means of step ${row.step}; generation includes the wait for a place.`,
    x: row.turns.map((_, i) => i + 1), xLabel: "turn", steps: row.turns.map(() => row.step), alone: true, lines: lines.filter((line) => line.values.some((value) => value !== null)) };
}

function rate(known, x) {
  const at = new Map(known.timings.map((row) => [row.step, row.seconds]));
  const values = known.metrics.map((row) => (at.get(row.step) > 0 && typeof row.trained_tokens === "number" ? row.trained_tokens / at.get(row.step) : null));
  return values.some((value) => value !== null) ? { key: "rate", title: "Trained tokens a second", about: "Over the whole step, sampling included.", x, steps: known.metrics.map((row) => row.step), lines: [{ label: "tokens/s", colour: "muted", values }] } : null;
}

function loss(known, x) {
  const held = has(known.metrics, "validation_loss");
  return chart("loss", "Loss", known, x, [
    { key: "loss", label: held ? "training" : "Loss", colour: "train" }, { key: "validation_loss", label: "validation", colour: "valid", points: true }],
  { about: has(known.metrics, "reward/mean") ? "Of the policy: it says little about progress." : `Nats per trained token.${held ? " Validation: on answers that are not trained on." : ""}` });
}

/** In this order on the page. */
export const SPECS = [
  reward,
  validation,
  parts,
  verdicts,
  lengths,
  single("length/truncated", "Answers cut off", "before", { share: true, about: "At the token limit." }),
  single("zero_variance", "Groups without a difference", "extra", { share: true, about: "All answers have the same reward: nothing is learned from them." }),
  episodes,
  single("entropy", "Entropy", "valid", { unit: "nats", about: "Per token. Falling to 0: the policy stops exploring." }),
  single("kl", "KL to the reference", "train", { unit: "nats", about: "Per token: how far the policy has moved away." }),
  single("mismatch/mean_abs", "Mismatch of sampler and trainer", "before", { unit: "nats", about: "Mean difference of the log-probs of the same tokens." }),
  clipped,
  single("grad_norm", "Gradient norm", "after", { about: "Before clipping. A spike: see Time travel." }),
  loss,
  single("reflection_rate", "Answers that reflect", "extra", { share: true, about: "Answers with words such as “wait” or “check”." }),
  single("lr", "Learning rate", "muted", { about: "After warm-up and decay." }),
  phases,
  turns,
  rate,
];

/** A chart for every column that none of the others shows. */
export function others(known, x, specs) {
  const shown = new Set(specs.flatMap((spec) => spec.lines.map((line) => line.key)));
  const names = [...new Set(known.metrics.flatMap((row) => Object.keys(row)))].sort();
  return names.filter((key) => !shown.has(key) && !LEFT_OUT.has(key) && key !== "reward/std" && key !== "clip_fraction" && !/^length\/(min|max)$/.test(key) && has(known.metrics, key))
    .map((key) => ({ key: `other ${key}`, title: key, x, steps: known.metrics.map((row) => row.step), lines: [{ key, label: key, colour: "muted", values: column(known.metrics, key) }] }));
}
