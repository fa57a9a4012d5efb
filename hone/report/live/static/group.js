// The answers to one prompt: their rewards and why, two of them pinned and compared word by word.

import { base, get } from "./api.js";
import { advantageBar, facts, plain, prompt, right, text, turns, verdict, why } from "./answer.js";
import { sideBySide } from "./diff.js";
import { fill, h, link, segments, toast } from "./dom.js";
import { address, number, plural } from "./format.js";

export async function page(context) {
  const [step, number_] = context.args.map(Number);
  const group = await get(`${base(context.run, context.stage)}/group/${step}/${number_}`, context.signal);
  const view = { pins: [], active: Math.max(0, group.answers.findIndex((one) => String(one.index) === context.params.get("answer"))), layout: context.params.get("as") ?? "columns" };
  const compared = h("section.compared", { "aria-live": "polite" });
  const answers = h("div.answers");
  const most = Math.max(...group.answers.map((one) => Math.abs(one.advantage ?? 0)));
  const cards = group.answers.map((answer, i) => card(context, answer, most, () => pin(i), context.params.get("answer") === String(answer.index)));
  fill(answers, cards);

  function pin(i) {
    view.pins = view.pins.includes(i) ? view.pins.filter((one) => one !== i) : [...view.pins.slice(-1), i];
    cards.forEach((element, k) => {
      element.classList.toggle("pinned", view.pins.includes(k));
      element.querySelector(".pin").setAttribute("aria-pressed", String(view.pins.includes(k)));
    });
    if (view.pins.length < 2) return fill(compared, view.pins.length ? h("p.quiet", null, "Pin another answer to compare the two.") : null);
    const [a, b] = [...view.pins].sort((x, y) => x - y).map((k) => group.answers[k]);
    const title = (one) => h("h3", null, `Answer ${one.index} `, verdict(one.verdict), h("span.quiet", null, ` reward ${number(one.total)}`));
    fill(compared, h("h2", null, "Difference"), sideBySide(plain(a), plain(b), [title(a), title(b)]));
    compared.scrollIntoView({ block: "start", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  }

  function activate(i, focus = true) {
    view.active = Math.max(0, Math.min(cards.length - 1, i));
    cards.forEach((element, k) => element.classList.toggle("active", k === view.active));
    if (!focus) return;
    cards[view.active].focus({ preventScroll: true });
    cards[view.active].scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  function layout(name) {
    view.layout = name;
    answers.className = `answers ${name}`;
  }

  const to = (n) => address(context.run, context.stage, "group", [step, n]);
  fill(context.main, h("section.page", null,
    h("div.title", null,
      h("h1", null, `Step ${step}, group ${number_}`),
      h("p.quiet", null, `Problem ${group.problem ?? "?"}${group.level ? `, level ${group.level}` : ""} · ${plural(group.answers.length, "answer")} · `,
        group.spread === 0 ? "all rewards are equal: nothing is learned from this group" : `rewards differ by ${number(group.spread)}`),
      h("div.controls", null,
        number_ > 0 ? link("← group before", to(number_ - 1)) : null,
        number_ < group.groups - 1 ? link("next group →", to(number_ + 1)) : null,
        link("every answer to this problem", address(context.run, context.stage, "rollouts", [], { problem: group.code })),
        segments("Layout", [["columns", "Columns"], ["list", "List"]], view.layout, layout))),
    h("details.promptbox", { open: true }, h("summary", null, "Prompt"), prompt(group.prompt)),
    h("dl.readings.ofgroup", null, right({ gold: group.gold, verdict: group.answers[0].verdict })),
    compared, answers));
  layout(view.layout);
  activate(view.active, context.params.has("answer"));
  context.keys({
    j: ["next answer", () => activate(view.active + 1)],
    k: ["answer before", () => activate(view.active - 1)],
    p: ["pin the answer; two pinned ones are compared", () => pin(view.active)],
    w: ["why this reward, on and off", () => { const box = cards[view.active].querySelector("details"); box.open = !box.open; }],
    Enter: ["open the answer and its tokens", () => (location.hash = sample(context, group.answers[view.active]))],
    n: ["next group", () => (number_ < group.groups - 1 ? (location.hash = to(number_ + 1)) : toast("This is the last group of the step"))],
    b: ["group before", () => (number_ > 0 ? (location.hash = to(number_ - 1)) : toast("This is the first group of the step"))],
  });
}

const sample = (context, answer) => address(context.run, context.stage, "sample", [answer.step, answer.place]);

function card(context, answer, most, pin, open) {
  return h("article.card", { tabindex: 0, "aria-label": `Answer ${answer.index}` },
    h("header", null,
      h("h2", null, link(`Answer ${answer.index}`, sample(context, answer))), verdict(answer.verdict),
      h("span.grow"), h("button.pin", { type: "button", "aria-pressed": "false", onclick: pin }, "Pin")),
    advantageBar(answer.advantage, most),
    facts(answer),
    answer.turns.length ? turns(answer) : text(answer.pieces),
    h("details", { open }, h("summary", null, "Why this reward"), why(answer)));
}
