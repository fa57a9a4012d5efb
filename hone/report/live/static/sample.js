// One answer: why it got its reward, and its tokens coloured by one value at a time.

import { base, get } from "./api.js";
import { facts, plain, prompt, text, turns, verdict, why } from "./answer.js";
import { Chart } from "./chart.js";
import { fill, h, link, segments, toast } from "./dom.js";
import { address, number, signed, whole } from "./format.js";

/** name: [title, value of a token, whether it has a sign, what it is] */
const OVERLAYS = {
  entropy: ["Entropy", (t, i) => t.entropies[i], false, "How undecided the model was before this token, in nats."],
  probability: ["Probability", (t, i) => (t.sampled_logprobs[i] === null ? null : Math.exp(t.sampled_logprobs[i])), false, "Of this token when it was sampled."],
  advantage: ["Advantage", (t, i) => t.advantages[i], true, "Above 0: the update makes the token more likely."],
  mismatch: ["Log-ratio", (t, i) => (t.trainer_logprobs[i] === null || t.sampled_logprobs[i] === null ? null : t.trainer_logprobs[i] - t.sampled_logprobs[i]), true, "Log-prob of the trainer minus that of the sampler; near 0 if both compute the same."],
  trained: ["Trained", (t, i) => (t.trainer_logprobs[i] === null ? 0 : 1), false, "1 where the update computed a gradient."],
};
const LEVELS = 6;

export async function page(context) {
  const [step, place] = context.args.map(Number);
  const path = base(context.run, context.stage);
  const answer = await get(`${path}/sample/${step}/${place}`, context.signal);
  const tokens = answer.tokens_of;
  const view = { overlay: OVERLAYS[context.params.get("overlay")] ? context.params.get("overlay") : "text", at: -1 };
  const body = h("div.body");
  const detail = h("p.detail", { "aria-live": "polite" });
  const plot = h("div");
  let chart = null;
  let spans = [];

  function show(name) {
    view.overlay = name;
    context.replace(address(context.run, context.stage, "sample", context.args, { overlay: name === "text" ? "" : name }));
    chart?.destroy();
    chart = null;
    spans = [];
    fill(plot);
    fill(detail);
    if (name === "text") return fill(body, answer.turns.length ? turns(answer) : text(answer.pieces));
    if (name === "raw") return fill(body, h("pre.answer", null, plain(answer)));
    const [title, value, isSigned, about] = OVERLAYS[name];
    const values = tokens.ids.map((_, i) => value(tokens, i));
    if (values.every((v) => v === null)) {
      fill(plot, h("p.quiet", null, `${title} is not known: the update took no gradient from this answer.`));
      return fill(body, h("pre.answer", null, tokens.pieces.join("")));
    }
    const most = Math.max(1e-9, ...values.map((v) => Math.abs(v ?? 0)));
    detail.textContent = "Click a token or the chart, or press n for the next outlier.";
    spans = tokens.pieces.map((piece, i) => h("span", { class: shade(values[i], most, isSigned), onclick: () => inspect(i) }, piece));
    fill(body, scale(title, most, isSigned), h("pre.answer.tokens", null, spans));
    chart = new Chart({ key: "tokens", title: `${title} by position`, about, x: values.map((_, i) => i), xLabel: "token", lines: [{ label: title, colour: isSigned ? "before" : "train", values }], pick: inspect }, `tokens ${Math.random()}`);
    fill(plot, chart.element);
  }

  function inspect(i) {
    spans[view.at]?.classList.remove("here");
    view.at = i;
    const span = spans[i];
    if (!span) return;
    span.classList.add("here");
    span.scrollIntoView({ block: "nearest" });
    const values = Object.entries(OVERLAYS).filter(([name]) => name !== "trained").map(([, [title, value, isSigned]]) => `${title.toLowerCase()} ${isSigned ? signed(value(tokens, i)) : number(value(tokens, i))}`);
    fill(detail, h("b", null, `Token ${whole(i)} `), h("code", null, JSON.stringify(tokens.pieces[i])), ` id ${tokens.ids[i]} · ${values.join(" · ")}`);
  }

  /** The largest values first, in the order of their size. */
  function outlier(by) {
    if (!spans.length) { show("entropy"); pick("entropy"); }
    const value = OVERLAYS[view.overlay][1];
    const low = view.overlay === "probability";
    const order = tokens.ids.map((_, i) => [low ? -(value(tokens, i) ?? 1) : Math.abs(value(tokens, i) ?? 0), i]).sort((a, b) => b[0] - a[0]).map(([, i]) => i);
    const now = order.indexOf(view.at);
    inspect(order[Math.max(0, Math.min(order.length - 1, now + by))]);
  }

  const options = [["text", "Text"], ...(tokens ? Object.entries(OVERLAYS).map(([key, [title, , , about]]) => [key, title, about]) : []), ["raw", "Raw"]];
  const chooser = segments("Show", options, view.overlay, show);
  const pick = (name) => chooser.pick(name);
  if (!tokens && view.overlay !== "raw") view.overlay = "text";
  const to = (n) => address(context.run, context.stage, "sample", [step, n], { overlay: view.overlay === "text" ? "" : view.overlay });
  const copy = async () => {
    await navigator.clipboard.writeText(plain(answer));
    toast("The text was copied");
  };
  const permalink = async () => {
    await navigator.clipboard.writeText(location.href);
    toast("The address was copied");
  };
  fill(context.main, h("section.page", null,
    h("div.title", null,
      h("h1", null, `Step ${step}, sample ${place} `, verdict(answer.verdict)),
      h("p.quiet", null, `Problem ${answer.problem ?? "?"}${answer.level ? `, level ${answer.level}` : ""} · answer ${answer.index ?? "?"} of its group · model of step ${answer.version ?? "?"}`),
      h("div.controls", null, link("the whole group", address(context.run, context.stage, "group", [step, answer.group], { answer: answer.index })),
        place > 0 ? link("← sample before", to(place - 1)) : null, place < answer.samples - 1 ? link("next sample →", to(place + 1)) : null)),
    facts(answer),
    h("div.reading", null,
      h("div", null, h("details.promptbox", null, h("summary", null, "Prompt"), prompt(answer.prompt)),
        chooser, detail, body,
        h("div.controls", null, h("button", { type: "button", onclick: copy }, "Copy text"), h("button", { type: "button", onclick: permalink }, "Copy address"),
          h("a", { href: `${path}/text/${step}/${place}`, download: true }, "Save as a file"))),
      h("aside", null, plot, why(answer))),
    tokens ? null : h("p.quiet", null, "The tokens of this step are not in the run folder.")));
  show(view.overlay);
  const keys = { c: ["copy the text", copy], y: ["copy the address", permalink], g: ["the whole group", () => (location.hash = address(context.run, context.stage, "group", [step, answer.group], { answer: answer.index }))],
    j: ["next sample", () => place < answer.samples - 1 && (location.hash = to(place + 1))], k: ["sample before", () => place > 0 && (location.hash = to(place - 1))] };
  if (tokens) Object.assign(keys, {
    o: ["next way to show the tokens", () => pick(options[(options.findIndex(([key]) => key === view.overlay) + 1) % options.length][0])],
    n: ["next outlier", () => outlier(1)], b: ["outlier before", () => outlier(-1)] });
  context.keys(keys);
  context.signal.addEventListener("abort", () => chart?.destroy());
}

function shade(value, most, isSigned) {
  if (value === null || value === undefined) return "t-none";
  const level = Math.min(LEVELS, Math.round((LEVELS * Math.abs(value)) / most));
  return level === 0 ? "t0" : isSigned && value < 0 ? `n${level}` : `t${level}`;
}

function scale(title, most, isSigned) {
  const steps = Array.from({ length: LEVELS + 1 }, (_, i) => h("i", { class: `t${i}` }));
  const below = isSigned ? Array.from({ length: LEVELS }, (_, i) => h("i", { class: `n${LEVELS - i}` })) : [];
  return h("p.scale", { "aria-label": `Scale from ${isSigned ? number(-most) : 0} to ${number(most)}` }, isSigned ? number(-most) : "0", h("span", null, below, steps), number(most));
}
