// A few answers of a selection, one after the other or beside each other, each with its prompt and why it got its reward.

import { base, get } from "./api.js";
import { advantageBar, facts, prompt, text, turns, verdict, why } from "./answer.js";
import { fill, h, link, toast } from "./dom.js";
import { address, plural, whole } from "./format.js";

const SHOWN = 3;

export async function page(context) {
  const path = base(context.run, context.stage);
  const query = Object.fromEntries([...context.params].filter(([name]) => name !== "start"));
  const start = Math.max(0, Number(context.params.get("start")) || 0);
  const listed = await get(`${path}/rollouts?${new URLSearchParams({ ...query, start, count: SHOWN })}`, context.signal);
  const answers = await Promise.all(listed.rows.map((row) => get(`${path}/sample/${row.step}/${row.place}`, context.signal)));
  const to = (at) => address(context.run, context.stage, "read", [], { ...query, start: at || "" });
  const most = Math.max(...answers.map((one) => Math.abs(one.advantage ?? 0)));
  const before = Math.max(0, start - SHOWN);
  const after = start + SHOWN;
  fill(context.main, h("section.page", null,
    h("div.title", null, h("h1", null, answers.length ? `Answers ${whole(start + 1)} to ${whole(start + answers.length)}` : "Answers"),
      h("p.quiet", null, `of ${plural(listed.total, "selected answer")}`),
      h("div.controls", null, link("the selection", address(context.run, context.stage, "rollouts", [], query)),
        start > 0 ? link(`← ${SHOWN} before`, to(before)) : null, after < listed.total ? link(`next ${SHOWN} →`, to(after)) : null)),
    answers.length ? h("div.answers.columns", null, answers.map((one) => card(context, one, most))) : h("p.empty", null, "No answer is selected.")));
  context.keys({
    n: ["next answers", () => (after < listed.total ? (location.hash = to(after)) : toast("These are the last ones"))],
    b: ["answers before", () => (start > 0 ? (location.hash = to(before)) : toast("These are the first ones"))],
  });
}

function card(context, answer, most) {
  return h("article.card", { "aria-label": `Step ${answer.step}, sample ${answer.place}` },
    h("header", null,
      h("h2", null, link(`Step ${answer.step}, sample ${answer.place}`, address(context.run, context.stage, "sample", [answer.step, answer.place]))), verdict(answer.verdict),
      h("span.grow"), link("its group", address(context.run, context.stage, "group", [answer.step, answer.group], { answer: answer.index }))),
    advantageBar(answer.advantage, most), facts(answer),
    why(answer),
    h("details.promptbox", null, h("summary", null, "Prompt"), prompt(answer.prompt)),
    answer.turns.length ? turns(answer) : text(answer.pieces));
}
