// Every setting with its origin, the run's versions, and the differences from another run.

import { base, get } from "./api.js";
import { choice, fill, h, segments } from "./dom.js";
import { address } from "./format.js";

const ORIGINS = { recipe: "recipe", resumed: "changed on resuming", default: "default" };

export async function page(context) {
  const data = await get(`${base(context.run, context.stage)}/settings`, context.signal);
  const view = { which: "chosen", text: "" };
  const list = h("div");
  const compared = h("div");
  const draw = () => {
    const rows = data.settings.filter((row) => (view.which === "all" || row.origin !== "default") && row.key.includes(view.text));
    fill(list, rows.length ? h("div.scroll", { tabindex: 0, role: "region", "aria-label": "Settings" }, h("table.settings", null,
      h("thead", null, h("tr", null, ["Setting", "Value", "Origin"].map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", null, rows.map((row) => h("tr", { class: row.origin }, h("th", { scope: "row" }, row.key), h("td", null, value(row.value)),
        h("td", null, ORIGINS[row.origin], row.origin === "resumed" ? [", before: ", value(row.before)] : null)))))) : h("p.empty", null, "No setting matches."));
  };
  fill(context.main, h("section.page", null,
    h("div.title", null, h("h1", null, "Settings"), h("div.controls", null,
      segments("Which settings", [["chosen", "Chosen"], ["all", "All"]], view.which, (which) => { view.which = which; draw(); }),
      h("label.field", null, h("span", null, "Search"), h("input", { type: "search", id: "search", oninput: (event) => { view.text = event.target.value.trim(); draw(); } })))),
    list, h("h2", null, "Compare with another run"), compared, h("h2", null, "How it was made"), made(data.manifest)));
  draw();
  context.keys({ "/": ["search", () => document.getElementById("search").focus()], a: ["all settings or only the chosen ones", () => { view.which = view.which === "all" ? "chosen" : "all"; context.main.querySelector(".segments").pick(view.which); }] });
  await compare(context, compared);
}

function value(one) {
  return h("code", null, typeof one === "string" && one !== "" ? one : JSON.stringify(one));
}

function made(manifest) {
  const rows = Object.entries(manifest);
  return rows.length ? h("dl.made", null, rows.map(([key, one]) => [h("dt", null, key), h("dd", null, typeof one === "string" ? one : JSON.stringify(one))])) : h("p.quiet", null, "No manifest.json was written yet.");
}

async function compare(context, place) {
  const own = `${context.run}/${context.stage}`;
  const { runs } = await get("/api/runs", context.signal);
  const others = runs.flatMap((run) => run.stages.map((stage) => `${run.name}/${stage.name}`)).filter((name) => name !== own);
  if (!others.length) return fill(place, h("p.quiet", null, "There is no other run here. ", h("code", null, "hone view FOLDER"), " shows several."));
  const result = h("div");
  const load = async (other) => {
    context.replace(address(context.run, context.stage, "settings", [], { with: other }));
    if (!other) return fill(result);
    const { differences } = await get(`/api/compare?${new URLSearchParams({ a: own, b: other })}`, context.signal);
    fill(result, differences.length ? h("div.scroll", { tabindex: 0, role: "region", "aria-label": "Differences" }, h("table.settings", null,
      h("thead", null, h("tr", null, ["Setting", own, other].map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", null, differences.map((row) => h("tr", null, h("th", { scope: "row" }, row.key), h("td", null, value(row.a)), h("td", null, value(row.b))))))) : h("p", null, "Both have the same settings."));
  };
  const chosen = context.params.get("with") ?? "";
  fill(place, choice("Run", [["", "choose one"], ...others.map((name) => [name, name.replace(/\/-$/, "")])], chosen, load), result);
  if (chosen) await load(chosen);
}
