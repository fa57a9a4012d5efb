// Everything unusual that happened, the newest first; warnings apart from routine.

import { Rows } from "./api.js";
import { fill, h, link, segments } from "./dom.js";
import { address, whole, words } from "./format.js";

const MOST = 400;

export async function page(context) {
  const file = new Rows(context.run, context.stage, "events");
  const warnings = new Set(context.state.warnings);
  const routine = new Set(context.state.routine);
  const view = { which: "notable" };
  const list = h("ol.log", { reversed: true });
  const count = h("p.quiet");
  const draw = () => {
    const kept = { notable: (event) => !routine.has(event.kind), warnings: (event) => warnings.has(event.kind), all: () => true }[view.which];
    const rows = file.rows.filter(kept).reverse();
    count.textContent = `${whole(rows.length)} of ${whole(file.rows.length)} events${rows.length > MOST ? `, the newest ${MOST}` : ""}`;
    if (!rows.length) return fill(list, h("li.empty", null, file.rows.length ? "Nothing of this kind happened." : "No event yet."));
    fill(list, rows.slice(0, MOST).map((event) => h("li", { class: warnings.has(event.kind) ? "warning" : "" },
      h("span.kind", null, words(event.kind ?? "?")),
      Number.isInteger(event.step) ? link(`step ${event.step}`, address(context.run, context.stage, "rollouts", [], { from: event.step, to: event.step })) : null,
      h("p", null, event.message ?? ""))));
  };
  fill(context.main, h("section.page", null, h("div.title", null, h("h1", null, "Log"), count,
    segments("Which events", [["notable", "Notable"], ["warnings", "Warnings"], ["all", "All"]], view.which, (which) => { view.which = which; draw(); })), list));
  await file.refresh(context.signal);
  draw();
  context.every(async () => (await file.refresh(context.signal)) && draw());
}
