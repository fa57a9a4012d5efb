// One step once more: what moved the weights, what another reward would have said, whether the answers come again.

import { Rows, base, get, post } from "./api.js";
import { verdict } from "./answer.js";
import { Chart } from "./chart.js";
import { fill, h, link } from "./dom.js";
import { address, number, percent, plural, signed, whole } from "./format.js";

const MOST = 10; // answers listed by their pull
const LISTED = 100; // answers whose reward is another
const SPIKES = 6;

export async function page(context) {
  const path = base(context.run, context.stage);
  const files = { metrics: new Rows(context.run, context.stage, "metrics"), events: new Rows(context.run, context.stage, "events") };
  const [options] = await Promise.all([get(`${path}/travel`, context.signal), ...Object.values(files).map((file) => file.refresh(context.signal))]);
  const steps = files.metrics.bySteps.map((row) => row.step);
  if (!steps.length) {
    return fill(context.main, h("section.page", null, h("h1", null, "Time travel"), h("p.empty", null, "This stage has no finished step yet.")));
  }
  const [first, last] = [steps[0], steps.at(-1)];
  const asked = Number(context.params.get("step") ?? spikes(files.events.rows)[0]?.step ?? last);
  const view = { step: Math.min(last, Math.max(first, Number.isInteger(asked) ? asked : last)) };
  const input = h("input", { type: "number", min: first, max: last, value: view.step, onchange: () => go(Number(input.value)) });
  const pulling = h("div");
  const again = h("div.results", { "aria-live": "polite" });
  const replayed = h("div.results", { "aria-live": "polite" });
  const gradient = chart(files.metrics.bySteps, files.events.rows, (step) => go(step));

  function go(step) {
    if (!Number.isInteger(step)) return;
    view.step = Math.min(last, Math.max(first, step));
    input.value = view.step;
    context.replace(address(context.run, context.stage, "travel", [], { step: view.step }));
    fill(again);
    fill(replayed);
    return pull(context, path, view.step, pulling);
  }

  const spiked = spikes(files.events.rows);
  fill(context.main, h("section.page", null,
    h("div.title", null, h("h1", null, "Time travel"), h("p.quiet", null, "One step of the past, looked at again."),
      h("div.controls", null, h("label.field.short", null, h("span", null, `Step, ${whole(first)} to ${whole(last)}`), input))),
    h("h2", null, "What moved the weights"),
    spiked.length ? h("ul.spikes", null, spiked.map((event) => h("li", null,
      link(`Step ${event.step}`, address(context.run, context.stage, "travel", [], { step: event.step }), { onclick: (click) => { click.preventDefault(); go(event.step); } }), ` ${event.message.replace(/^step \d+: /, "")}`))) :
      h("p.quiet", null, "No gradient was far above the usual size in this run."),
    h("div.beside", null, gradient?.element, pulling),
    h("h2", null, "Another reward"), rescoring(context, path, options, view, again), again,
    h("h2", null, "The same answers again"), replaying(context, path, options, view, replayed), replayed));
  context.keys({ j: ["next step", () => go(view.step + 1)], k: ["step before", () => go(view.step - 1)] });
  context.signal.addEventListener("abort", () => gradient?.destroy());
  await pull(context, path, view.step, pulling);
}

/** Events about a gradient far above the usual size, the newest first. */
const spikes = (events) => events.filter((event) => event.kind === "grad_spike" && Number.isInteger(event.step)).reverse().slice(0, SPIKES);

function chart(metrics, events, go) {
  const values = metrics.map((row) => (typeof row.grad_norm === "number" ? row.grad_norm : null));
  if (!values.some((value) => value !== null)) return null;
  const steps = metrics.map((row) => row.step);
  return new Chart({ key: "grad_norm", title: "Gradient norm", about: `Before clipping. Click a step to look at it.${spikes(events).length ? " Orange: a spike." : ""}`, x: steps, xLabel: "step",
    lines: [{ label: "gradient norm", colour: "after", values }], marks: spikes(events).map((event) => ({ x: event.step, strong: true })), pick: (at) => go(steps[at]) }, "travel");
}

/** The answers of a step by advantage times length: roughly their shares in its gradient. */
async function pull(context, path, step, place) {
  const { columns, verdicts, rows, drawn } = await get(`${path}/points?${new URLSearchParams({ preset: "pull", from: step, to: step })}`, context.signal);
  const answers = links(context, step);
  if (!rows) return fill(place, h("h3", null, `Step ${whole(step)}`), h("p.quiet", null, "No answer had an advantage, so nothing was learned. ", answers));
  const pulls = columns.tokens.map((tokens, i) => tokens * Math.abs(columns.advantage[i]));
  const sum = pulls.reduce((a, b) => a + b, 0);
  const share = (i) => (drawn === rows && sum > 0 ? percent(pulls[i] / sum, 1) : "–");
  const line = (i) => h("tr", null,
    h("th", { scope: "row" }, link(`sample ${columns.place[i]}`, address(context.run, context.stage, "sample", [step, columns.place[i]], { overlay: "advantage" }))),
    h("td", null, verdict(verdicts[columns.verdict[i]])), h("td.num", null, share(i)), h("td.num", null, signed(columns.advantage[i])),
    h("td.num", null, whole(columns.tokens[i])), h("td.num", null, number(columns.total[i])));
  fill(place, h("h3", null, `The answers of step ${whole(step)} that pull hardest`),
    h("p.quiet", null, "Share: advantage times length, of the sum over the step: an estimate. The line of a spike has measured shares. ", answers),
    scroll("Answers that pull hardest", table(["Answer", "Verdict", "Share", "Advantage", "Tokens", "Reward"], [2, 3, 4, 5], pulls.slice(0, MOST).map((_, i) => line(i)))));
}

const links = (context, step) => link("All answers of the step", address(context.run, context.stage, "rollouts", [], { preset: "pull", from: step, to: step }));

// --- work on the server --------------------------------------------------------------------------------------------

function rescoring(context, path, options, view, place) {
  if (!options.allowed) return off("scores the answers of a step with another reward and shows both beside each other",
    "hone view RUN --allow-rescore --reward other.yaml");
  const select = h("select", null, options.rewards.map((name) => h("option", { value: name }, name === "" ? "the run’s own, as it is now" : name)));
  return h("div", null,
    h("p.quiet", null, "Scores the recorded answers in a process of its own. Nothing is written to the run."),
    h("div.controls", null, h("label.field", null, h("span", null, "Reward"), select),
      button("Score again", place, async () => compared(context, await post(`${path}/rescore?${new URLSearchParams({ step: view.step, reward: select.value })}`, context.signal)))));
}

function replaying(context, path, options, view, place) {
  if (!options.allowed) return off("samples the answers of a step again from its checkpoint, and compares the tokens", "hone view RUN --allow-rescore");
  const kept = options.checkpoints.length ? `Kept: those before step ${options.checkpoints.map(whole).join(", ")}.` : "No checkpoint was kept.";
  return h("div", null,
    h("p.quiet", null, `Samples the step again with the weights of its checkpoint, and compares the tokens. ${kept}`),
    h("div.controls", null, button("Sample again", place, async () => repeated(context, await post(`${path}/replay?${new URLSearchParams({ step: view.step })}`, context.signal)))));
}

function off(what, command) {
  return h("p.quiet", null, `Off: this ${what}. It starts work on this machine, so it has to be allowed: `, h("code", null, command));
}

/** A button that shows what `work` gives, or the message of its error. */
function button(title, place, work) {
  const element = h("button", { type: "button", onclick: async () => {
    element.disabled = true;
    fill(place, h("p.quiet", { role: "status" }, "Working …"));
    try {
      fill(place, await work());
    } catch (error) {
      if (error.name !== "AbortError") fill(place, h("p.failed", { role: "alert" }, error.message));
    } finally {
      element.disabled = false;
    }
  } }, title);
  return element;
}

function compared(context, result) {
  const changed = result.answers.filter((one) => one.old !== one.new || one.old_verdict !== one.new_verdict);
  const mean = (name) => {
    const known = result.answers.map((one) => one[name]).filter((value) => value !== null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };
  const [before, after] = result.differences;
  const facts = [
    `${plural(result.answers.length, "answer")} of step ${whole(result.step)}: ${changed.length ? `${whole(changed.length)} with another reward or verdict` : "every reward and verdict is the same"}.`,
    `Mean reward ${number(mean("old"))} → ${number(mean("new"))}.`,
    `Groups with a difference: ${whole(before)} → ${whole(after)} of ${whole(result.groups)}.`,
    result.left_out.length ? `Left out, since they need a model or a live environment: ${result.left_out.join(", ")}.` : "",
    result.unknown ? `${plural(result.unknown, "answer")} to problems that the task no longer has.` : "",
    result.tokens ? "" : "The tokens were not recorded: a reward that reads token ids sees zeros.",
  ].filter(Boolean);
  const line = (one) => h("tr", null,
    h("th", { scope: "row" }, link(`sample ${one.place}`, address(context.run, context.stage, "sample", [result.step, one.place]))),
    h("td", null, verdict(one.old_verdict)), h("td.num", null, number(one.old)), h("td", null, verdict(one.new_verdict)),
    h("td.num", null, number(one.new)), h("td.num", null, one.new === null ? "–" : signed(one.new - one.old)), h("td", null, one.note ?? ""));
  return [h("p", null, facts.join(" ")),
    changed.length ? scroll("Answers whose reward is another", table(["Answer", "Verdict then", "Reward then", "Verdict now", "Reward now", "Change", "Note"], [2, 4, 5], changed.slice(0, LISTED).map(line))) : null,
    changed.length > LISTED ? h("p.quiet", null, `and ${whole(changed.length - LISTED)} more`) : null];
}

function repeated(context, result) {
  const same = result.identical === result.answers;
  const part = result.of > result.answers ? ` (${whole(result.of - result.answers)} answers of refills are not sampled again)` : "";
  const token = (one, i) => (one.ids[i] === null ? h("span.quiet", null, "the answer had ended") :
    [h("code", null, JSON.stringify(one.pieces[i])), h("span.quiet", null, ` id ${one.ids[i]}`)]);
  const line = (one) => h("tr", null,
    h("th", { scope: "row" }, link(`sample ${one.place}`, address(context.run, context.stage, "sample", [result.step, one.place], { overlay: "probability" }))),
    h("td.num", null, whole(one.position)), h("td", null, token(one, 0)), h("td", null, token(one, 1)));
  return [h("p", null, h("b", null, same ? "Identical" : `${whole(result.identical)} of ${plural(result.answers, "answer")} identical`),
    same ? `: ${plural(result.answers, "answer")}, ${whole(result.tokens)} tokens${part}.` : `${part}. Another machine, library or number of threads rounds differently, and then a token can differ.`),
    same ? null : scroll("First differences", table(["Answer", "First difference at token", "Recorded", "Now"], [1], result.differences.map(line)))];
}

function table(heads, numbers, rows) {
  return h("table", null, h("thead", null, h("tr", null, heads.map((title, i) => h("th", { scope: "col", class: numbers.includes(i) ? "num" : null }, title)))), h("tbody", null, rows));
}

const scroll = (label, inner) => h("div.scroll", { tabindex: 0, role: "region", "aria-label": label }, inner);
